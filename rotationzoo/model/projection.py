"""The output projection of each layer: the linear map from its heads into the residual stream.

accelerate may keep a weight on disk until its module runs, and a weight may be stored in FP8 with
scales, or packed by a library of which this module knows nothing. Weights are therefore read where
they are, one layer at a time; in float32, those of all layers together are as large as a small
model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rotationzoo.errors import RotationZooError
from rotationzoo.model.capture import Attention, decoder, intercept, loaded
from rotationzoo.model.geometry import Geometry, Layer
from rotationzoo.model.loading import input_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WEIGHT, DEQUANTIZED = "weight", "dequantized"
# FP8 weights are multiplied by these, per block, per row or as a whole. Despite its name, the first
# is not the inverse of the second.
_SCALES = ("weight_scale_inv", "weight_scale")
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_PROBE_TOKENS = 8
_ROWS_AT_A_TIME = 1024


@dataclass(frozen=True)
class OutputProjection:
    """The module that projects a layer's heads. It is None where no linear map of the right width
    follows the layer's attention."""

    layer: Layer
    module: torch.nn.Module | None

    @torch.no_grad()
    def read(self) -> tuple[torch.Tensor | None, str]:
        """The matrix of each query head, `[H_q, D_v, hidden]` float32, and its origin: the module's
        `weight`, or `dequantized` from FP8 or from a library's packed form. Where it cannot be
        read, the result is None and `identity: ` with the reason.

        Raises `RotationZooError` where the matrix is not finite.
        """
        if self.module is None:
            width = self.layer.query_heads * self.layer.value_dim
            return None, f"identity: no linear map of {width} channels runs after the attention"
        with loaded(self.module):
            weight, origin = _weight(self.module)
            if weight is None:
                return None, origin
            split = (self.layer.query_heads, -1)
            heads = torch.unflatten(weight.float().T, 0, split).contiguous()
        if not torch.isfinite(heads).all():
            raise RotationZooError(
                f"the output projection of layer {self.layer.index} is not finite",
                hint="fetch the weights again",
            )
        return heads, origin


def _weight(module: torch.nn.Module) -> tuple[torch.Tensor | None, str]:
    """The weight `[hidden, H_q D_v]` of a loaded module, and its origin, as in `read`."""
    weight: Any = getattr(module, "weight", None)
    # Libraries that pack weights keep them in tensors of other names or of types of their own.
    if type(weight) not in _PLAIN or not weight.is_floating_point():
        packed = _weight_by_running(module)
        if packed is not None:
            return packed, DEQUANTIZED
        dtype = str(getattr(weight, "dtype", "another form")).removeprefix("torch.")
        return None, f"identity: its weights are kept as {dtype}"
    if weight.is_meta:
        return None, "identity: its weights are not in memory while it runs"
    if weight.itemsize > 1:
        return weight, WEIGHT
    scale = _scale(module)
    if scale is None or not scale.is_floating_point():
        return None, f"identity: its {weight.dtype} weights have no scale".replace("torch.", "")
    dequantized = _dequantize(weight, scale, getattr(module, "block_size", None))
    if dequantized is None:
        shapes = f"scales {list(scale.shape)} do not fit its weights {list(weight.shape)}"
        return None, f"identity: {shapes}"
    return dequantized, DEQUANTIZED


def _weight_by_running(module: torch.nn.Module) -> torch.Tensor | None:
    """The weight `[N, K]` of a linear map of any library, without its bias, from what it makes of
    the rows of the identity matrix; None where it cannot run.

    A one and zeros are exact in every type, also where a library quantizes activations by row. What
    is read is therefore the weight that the model multiplies with, rounded to its type.
    """
    reference = next((t for t in (*module.parameters(), *module.buffers()) if not t.is_meta), None)
    width: Any = getattr(module, "in_features", None)
    if reference is None or width is None:
        return None
    identity = torch.eye(width, dtype=torch.bfloat16, device=reference.device)
    try:
        bias = module(torch.zeros_like(identity[:1])).float()
        parts = [module(rows).float() - bias for rows in identity.split(_ROWS_AT_A_TIME)]
    except Exception:  # a module may need a GPU, or another type
        return None
    return torch.cat(parts).T


def _scale(module: torch.nn.Module) -> torch.Tensor | None:
    for name in _SCALES:
        scale: torch.Tensor | None = getattr(module, name, None)
        if scale is not None:
            return scale
    return None


def _dequantize(weight: torch.Tensor, scale: torch.Tensor, block_size: Any) -> torch.Tensor | None:
    """Multiply FP8 weights `[N, K]` by their scales: `[n, k]` per block, `[N]` or `[N, 1]` per row,
    or one for all. The last blocks may be cut short. Returns None where the shapes do not fit. This
    follows transformers' `_dequantize_fp8_weight`."""
    scale = scale.float()
    if scale.numel() == 1:
        return weight.float() * scale.reshape(())
    grid = scale[:, None] if scale.ndim == 1 else scale
    sizes = block_size or _divide_up(weight.shape, grid.shape)
    if _divide_up(weight.shape, sizes) != list(grid.shape):
        return None
    for dim, block in enumerate(sizes):
        grid = grid.repeat_interleave(block, dim).narrow(dim, 0, weight.shape[dim])
    return weight.float() * grid


def _divide_up(sizes: Sequence[int], divisors: Sequence[int]) -> list[int]:
    """Quotients, rounded up."""
    return [-(-size // divisor) for size, divisor in zip(sizes, divisors, strict=True)]


@torch.no_grad()
def output_projections(model: "PreTrainedModel", geometry: Geometry) -> dict[int, OutputProjection]:
    """Layer -> its output projection: the first linear map of the right width that runs after its
    attention."""
    widths = {layer.index: layer.query_heads * layer.value_dim for layer in geometry}
    modules: dict[int, torch.nn.Module] = {}
    waiting: list[int] = []  # the layer whose attention ran last, until its projection runs

    def note_attention(
        layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attend: Attention
    ) -> torch.Tensor:
        waiting[:] = [layer]
        return attend(query, key, value)

    def note_module(module: torch.nn.Module, _: Any) -> None:
        if waiting and module.in_features == widths[waiting[0]]:
            modules[waiting.pop()] = module

    # Not by class, because some libraries' quantized linear maps are not torch.nn.Linear.
    linear_maps = [module for module in model.modules() if hasattr(module, "in_features")]
    hooks: list[Any] = [module.register_forward_pre_hook(note_module) for module in linear_maps]
    try:
        with intercept(model, note_attention):
            ids = torch.zeros(1, _PROBE_TOKENS, dtype=torch.long, device=input_device(model))
            decoder(model)(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return {layer.index: OutputProjection(layer, modules.get(layer.index)) for layer in geometry}
