"""Rows quantized on an NVIDIA GPU, as `int2.quantize` and `feedback.quantize` define it: once, or
call after call as a cache does it, where nothing waits for the GPU until `check` asks whether a row
was refused."""

import importlib.util
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from rotationzoo.codec import cuda, int2
from rotationzoo.codec.clip import clip_position
from rotationzoo.codec.kernels import Quantize, QuantizeWithFeedback
from rotationzoo.errors import RotationZooError

_OLDEST_GPU = 8, 0  # the compute capability that the kernels need
_FEW = 2000
"""Rows up to which a block for each is not slower than a thread for each: on an H200, as fast at
2,000 rows of 128 channels, 4 times as fast at 512, 6 times at 8. Both kernels stand in
`feedback.cu`; the first was changed since, and not timed by itself."""


@dataclass(frozen=True, eq=False)
class Encoder:
    """Quantizes rows of one side of a layer; `clip_encoder` and `feedback_encoder` make one."""

    variant: cuda.Variant
    kernel: cuda.Kernel
    inputs: dict[str, Any]
    """The tensors that the kernel reads in addition to the rows, by the names of its arguments."""
    refused: torch.Tensor
    """Set on the GPU where a row was not finite, or too large."""
    few: cuda.Kernel | None = None
    """The kernel for so few rows that it is faster, if there is one."""

    def __call__(self, rows: torch.Tensor) -> int2.Quantized:
        """The packed codes `[B, H, T, row bytes]` of rows `[B, H, T, D]`, with their scales and
        offsets `[B, H, T, G]`: equal to the definition's, bit by bit."""
        packed = self.store(rows.transpose(0, 1).flatten(1, 2))
        # Formats without an offset have one of no numbers.
        scale, offset = packed.metadata[..., 0], packed.metadata[..., 1:].flatten(-2)
        parts = packed.codes, scale, offset
        by_row = (part.unflatten(1, (len(rows), -1)).transpose(0, 1) for part in parts)
        return int2.Quantized(*by_row)

    def store(self, rows: torch.Tensor, rotated: torch.Tensor | None = None) -> cuda.Packed:
        """Quantize and pack rows `[H, N, D]` of the variant's type. `rotated` `[H, N, D]` float32
        receives the products with the rotation, if there is one."""
        packed = cuda.empty_packed(rows, self.variant.group, self.variant.format)
        rows, few = rows.contiguous(), None
        named = self.inputs | {"codes": packed.codes, "metadata": packed.metadata}
        named |= {"rows": rows, "length": rows.shape[1], "refused": self.refused}
        if self.is_for_few(rows.shape[:2].numel()):
            few = self.few
        kernel = few or self.kernel
        if self.variant.feedback:
            kernel(rows, QuantizeWithFeedback(**named))
        else:
            kernel(rows, Quantize(**named, rotated=rotated))
        return packed

    def is_for_few(self, rows: int) -> bool:
        """Whether `rows` is few enough for the kernel of few rows."""
        return self.few is not None and rows <= _FEW

    def check(self) -> None:
        """Wait for the GPU, and raise `RotationZooError` where it refused a row since the last
        call."""
        if self.refused.item():
            self.refused.zero_()
            raise int2.refusal()


def clip_encoder(
    clip: torch.Tensor,
    variant: cuda.Variant,
    device: torch.device,
    rotation: torch.Tensor | None = None,
) -> Encoder:
    """An encoder that chooses the codes of `int2.quantize` for clip ratios `[H]`. `rotation`
    `[H, D, D]`, if given, multiplies the rows first. Raises `RotationZooError` for shapes and types
    that the kernel does not support."""
    entry, weight = clip_position(clip, variant.dim, variant.format.interpolated)
    matrix = None if rotation is None else rotation.float().contiguous()
    variant = replace(variant, clips=bool((clip < 1).any()), rotates=matrix is not None)
    kernel = cuda.compiled("quantize", variant, device)
    inputs = {"rotation": matrix, "ranks": entry.int().to(device), "weights": weight.to(device)}
    return Encoder(variant, kernel, inputs, _unset_flag(device))


def feedback_encoder(factor: torch.Tensor, variant: cuda.Variant, device: torch.device) -> Encoder:
    """An encoder that chooses the codes of `feedback.quantize` for a factor `[H, D, D]`, which
    `linalg.error_feedback.factorize` returns.

    Raises `RotationZooError` for shapes and types that the kernel does not support, and for a
    factor of another shape or that is not finite.
    """
    check_factor(factor, len(factor), variant.dim)
    variant = replace(variant, feedback=True)
    kernel = cuda.compiled("quantize_with_feedback", variant, device)
    weights = factor.to(device, torch.float32).contiguous()
    few = cuda.compiled(cuda.FEW, variant, device)
    return Encoder(variant, kernel, {"factors": weights}, _unset_flag(device), few)


def supports(variant: cuda.Variant) -> bool:
    """Whether the kernels quantize rows of this shape, type and format."""
    try:
        variant.macros()
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


def _unset_flag(device: torch.device) -> torch.Tensor:
    return torch.zeros((), dtype=torch.int32, device=device)


def check_factor(factor: torch.Tensor, heads: int, dim: int) -> None:
    """Raise `RotationZooError` unless the kernel can read this factor for rows of `heads` heads."""
    shape = heads, dim, dim
    if factor.shape != shape:
        problem = f"is {list(factor.shape)} and not {list(shape)}"
    elif not factor.isfinite().all():
        problem = "is not finite"
    else:
        return
    hint = "linalg.error_feedback.factorize makes one for every KV head"
    raise RotationZooError(f"the factor of error feedback {problem}", hint)
