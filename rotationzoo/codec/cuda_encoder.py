"""Rows quantized on an NVIDIA GPU call after call, as a cache does it: nothing waits for the GPU
until somebody asks whether a row was refused."""

import importlib.util
from dataclasses import dataclass
from functools import cache

import torch

from rotationzoo.codec import cuda, int2
from rotationzoo.codec.clip import clip_position
from rotationzoo.codec.cuda_feedback import check_factor
from rotationzoo.codec.formats import Format
from rotationzoo.errors import RotationZooError

_OLDEST_GPU = 8, 0  # the compute capability that the kernels need


@dataclass(frozen=True, eq=False)
class Encoder:
    """Quantizes rotated rows of one side of a layer; `clip_encoder` and `feedback_encoder` make
    one."""

    kernel: cuda.Kernel
    inputs: tuple[torch.Tensor | None, ...]
    """What the kernel reads besides the rows."""
    rotated: tuple[None, ...]
    """Outputs that the kernel has and nobody wants."""
    group: int
    format: Format
    refused: torch.Tensor
    """Set on the GPU where a row was not finite, or too large."""

    def __call__(self, rows: torch.Tensor) -> int2.Quantized:
        """The packed codes `[B, H, T, D / 4]` of float32 rows `[B, H, T, D]`, with their scales and
        offsets `[B, H, T, G]`: those of the definition, bit by bit."""
        batch = len(rows)
        by_head = rows.transpose(0, 1).flatten(1, 2).contiguous()
        packed, _ = cuda.empty_packed(by_head, self.group, self.format)
        stored = packed.codes, packed.metadata, *self.rotated, self.refused
        self.kernel(by_head, by_head.shape[1], *self.inputs, *stored)
        parts = packed.codes, *packed.metadata.unbind(-1)
        return int2.Quantized(*(part.unflatten(1, (batch, -1)).transpose(0, 1) for part in parts))

    def check(self) -> None:
        """Wait for the GPU, and raise `RotationZooError` where it refused a row."""
        cuda.check_refused(self.refused)


def clip_encoder(
    clip: torch.Tensor, dim: int, group: int, format: Format, device: torch.device
) -> Encoder:
    """An encoder that chooses the codes of `int2.quantize` for clip ratios `[H]`. Raises
    `RotationZooError` as `cuda.quantize` does."""
    channels = group if format.clip_scope == "group" else dim
    entry, weight = clip_position(clip, channels, format.interpolated)
    variant = cuda.Variant(dim, group, torch.float32, format, clips=bool((clip < 1).any()))
    kernel = cuda.compiled("quantize", variant, device)
    inputs = None, entry.int().to(device), weight.to(device)  # and no rotation
    return Encoder(kernel, inputs, (None,), group, format, _unset(device))


def feedback_encoder(
    factor: torch.Tensor, group: int, format: Format, device: torch.device
) -> Encoder:
    """An encoder that chooses the codes of `feedback.quantize` for a factor `[H, D, D]`. Raises
    `RotationZooError` as `cuda_feedback.quantize` does."""
    heads, dim, _ = factor.shape
    check_factor(factor, heads, dim)
    variant = cuda.Variant(dim, group, torch.float32, format, feedback=True)
    kernel = cuda.compiled("quantize_with_feedback", variant, device)
    weights = factor.to(device, torch.float32).contiguous()
    return Encoder(kernel, (weights,), (), group, format, _unset(device))


def supports(dim: int, group: int, format: Format) -> bool:
    """Whether the kernels quantize rows of `dim` channels in such groups."""
    if format.bisected:
        return False
    try:
        cuda.Variant(dim, group, torch.float32, format).macros()
    except RotationZooError:
        return False
    return True


@cache
def kernels_run_on(device: torch.device) -> bool:
    """Whether this machine can compile kernels for a device and run them there."""
    if device.type != "cuda" or not importlib.util.find_spec("cuda"):
        return False
    has_package = importlib.util.find_spec("cuda.core") is not None
    return has_package and torch.cuda.get_device_capability(device) >= _OLDEST_GPU


def _unset(device: torch.device) -> torch.Tensor:
    return torch.zeros((), dtype=torch.int32, device=device)
