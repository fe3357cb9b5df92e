"""Error feedback on an NVIDIA GPU: `feedback.cu` launched, as `codec.feedback` defines it."""

import torch

from rotationzoo.codec.cuda import Packed, Variant, check_refused, compiled, empty_packed
from rotationzoo.codec.formats import SGLANG, Format
from rotationzoo.errors import RotationZooError


def quantize(
    rows: torch.Tensor,
    factor: torch.Tensor,
    group_size: int | None = None,
    format: Format = SGLANG,
) -> Packed:
    """Quantize and pack rows `[H, N, D]` on a GPU, as `feedback.quantize` and `int2.pack` do.

    `factor` `[H, D, D]` is what `linalg.error_feedback.factorize` returns. `cuda.dequantize` reads
    the result. Raises `RotationZooError` for rows that are not finite or above 1e18, for shapes and
    types that the kernel does not support, and for a factor of another shape or that is not finite.
    """
    heads, count, dim = rows.shape
    group = group_size or dim
    check_factor(factor, heads, dim)
    variant = Variant(dim, group, rows.dtype, format, feedback=True)
    kernel = compiled("quantize_with_feedback", variant, rows.device)
    packed, refused = empty_packed(rows, group, format)
    weights = factor.to(rows.device, torch.float32).contiguous()
    kernel(rows.contiguous(), count, weights, packed.codes, packed.metadata, refused)
    check_refused(refused)
    return packed


def check_factor(factor: torch.Tensor, heads: int, dim: int) -> None:
    """Raise `RotationZooError` unless the kernel can read this factor for rows of so many heads."""
    shape = heads, dim, dim
    if factor.shape != shape:
        problem = f"is {list(factor.shape)} and not {list(shape)}"
    elif not factor.isfinite().all():
        problem = "is not finite"
    else:
        return
    raise RotationZooError(
        f"the factor of error feedback {problem}",
        hint="linalg.error_feedback.factorize makes one for every KV head",
    )
