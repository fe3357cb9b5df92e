"""The output projection of each layer: the linear map through which its heads reach the residual
stream.

A weight may be on disk until its module runs, where accelerate offloads it, and may be kept in FP8
with scales. It is read where it is, one layer at a time: in float32 those of all layers are as
large as a small model.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from rotationzoo.errors import RotationZooError
from rotationzoo.model.capture import Attention, decoder, intercept, loaded
from rotationzoo.model.geometry import Geometry, Layer
from rotationzoo.model.loading import input_device

WEIGHT, DEQUANTIZED = "weight", "dequantized"
_SCALES = (
    "weight_scale_inv",
    "weight_scale",
)  # of FP8 weights: by block, by row or one for all; both are multiplied with
_PROBE_TOKENS = 8


@dataclass(frozen=True)
class OutputProjection:
    """The module that projects a layer's heads, or None where no linear map of the right width
    follows its attention."""

    layer: Layer
    module: torch.nn.Module | None

    @torch.no_grad()
    def read(self) -> tuple[torch.Tensor | None, str]:
        """What it makes of each query head, `[H_q, D_v, hidden]` float32, and whether that is the
        module's `weight` or was `dequantized` from FP8. None, and the words `identity: ` with a
        reason, where it cannot be told.

        Raises `RotationZooError` where it is not finite.
        """
        if self.module is None:
            width = self.layer.query_heads * self.layer.value_dim
            return None, f"identity: no linear map of {width} channels runs after the attention"
        with loaded(self.module):
            weight, kept = _weight(self.module)
            if weight is None:
                return None, kept
            heads = weight.float().T.unflatten(0, (self.layer.query_heads, -1)).contiguous()
        if not torch.isfinite(heads).all():
            raise RotationZooError(
                f"the output projection of layer {self.layer.index} is not finite",
                hint="fetch the weights again",
            )
        return heads, kept


def _weight(module: torch.nn.Module) -> tuple[torch.Tensor | None, str]:
    """The weight `[hidden, H_q D_v]` of a module that is loaded."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or not weight.is_floating_point():
        dtype = str(getattr(weight, "dtype", "another form")).removeprefix("torch.")
        return None, f"identity: its weights are kept as {dtype}"
    if weight.is_meta:
        return None, "identity: its weights are not in memory while it runs"
    if weight.itemsize > 1:
        return weight, WEIGHT
    scale = next(
        (s for s in (getattr(module, name, None) for name in _SCALES) if s is not None), None
    )
    if scale is None or not scale.is_floating_point():
        return None, f"identity: its {weight.dtype} weights have no scale".replace("torch.", "")
    if (dequantized := _dequantize(weight, scale, getattr(module, "block_size", None))) is None:
        return (
            None,
            f"identity: scales {list(scale.shape)} do not fit its weights {list(weight.shape)}",
        )
    return dequantized, DEQUANTIZED


def _dequantize(weight: torch.Tensor, scale: torch.Tensor, block_size: Any) -> torch.Tensor | None:
    """FP8 weights `[N, K]` times scales `[n, k]` of blocks, `[N]` or `[N, 1]` of rows, or one for
    all; the last blocks may be cut short. None where the shapes do not fit. As transformers'
    `_dequantize_fp8_weight` has it."""
    scale = scale.float()
    if scale.numel() == 1:
        return weight.float() * scale.reshape(())
    grid = scale[:, None] if scale.ndim == 1 else scale
    sizes = block_size or [
        -(-size // count) for size, count in zip(weight.shape, grid.shape, strict=True)
    ]
    if [-(-size // block) for size, block in zip(weight.shape, sizes, strict=True)] != list(
        grid.shape
    ):
        return None
    for dim, block in enumerate(sizes):
        grid = grid.repeat_interleave(block, dim).narrow(dim, 0, weight.shape[dim])
    return weight.float() * grid


@torch.no_grad()
def output_projections(model: PreTrainedModel, geometry: Geometry) -> dict[int, OutputProjection]:
    """Each layer's output projection: the first linear map of the right width that is run after its
    attention."""
    widths = {layer.index: layer.query_heads * layer.value_dim for layer in geometry}
    modules: dict[int, torch.nn.Module] = {}
    waiting: list[int] = []

    def note_attention(
        layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attend: Attention
    ) -> torch.Tensor:
        waiting[:] = [layer]
        return attend(query, key, value)

    def note_module(module: torch.nn.Module, _: Any) -> None:
        if waiting and module.in_features == widths[waiting[0]]:
            modules[waiting.pop()] = module

    # Not by class: some libraries' quantized linear maps are no torch.nn.Linear.
    linear = [module for module in model.modules() if hasattr(module, "in_features")]
    hooks: list[Any] = [module.register_forward_pre_hook(note_module) for module in linear]
    try:
        with intercept(model, note_attention):
            ids = torch.zeros(1, _PROBE_TOKENS, dtype=torch.long, device=input_device(model))
            decoder(model)(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return {layer.index: OutputProjection(layer, modules.get(layer.index)) for layer in geometry}
