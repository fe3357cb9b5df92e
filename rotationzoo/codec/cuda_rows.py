"""Whole rows quantized on an NVIDIA GPU, and back, for `validate` to check and to time."""

import torch

from rotationzoo.codec import cuda
from rotationzoo.codec.cuda import Packed, Variant
from rotationzoo.codec.cuda_encoder import clip_encoder
from rotationzoo.codec.formats import SGLANG, Format
from rotationzoo.codec.kernels.parameters import Dequantize


def quantize(
    rows: torch.Tensor,
    clip: float | torch.Tensor = 1.0,
    group_size: int | None = None,
    format: Format = SGLANG,
    rotation: torch.Tensor | None = None,
    rotated: torch.Tensor | None = None,
) -> Packed:
    """Quantize and pack rows `[H, N, D]` as `int2.quantize` and `int2.pack` do.

    `clip` is one ratio, or one per head `[H]`. `rotation` `[H, D, D]`, if given, multiplies the
    rows first; `rotated` `[H, N, D]` float32 receives the products. Raises `RotationZooError` for
    rows that are not finite or above 1e18, and for unsupported shapes and types.
    """
    ratios, dim = torch.as_tensor(clip).expand(len(rows)), rows.shape[-1]
    variant = Variant(dim, group_size or dim, rows.dtype, format)
    encoder = clip_encoder(ratios, variant, rows.device, rotation)
    packed = encoder.store(rows, rotated)
    encoder.check()
    return packed


def dequantize(
    packed: Packed, dtype: torch.dtype = torch.float32, rotation: torch.Tensor | None = None
) -> torch.Tensor:
    """Restore rows `[H, N, D]` as `int2.dequantize` does, rounded to `dtype`, and multiply them
    with the transpose of `rotation`, if given."""
    (heads, count, row_bytes), device = packed.codes.shape, packed.codes.device
    dim, groups = 4 * row_bytes, packed.metadata.shape[2]
    rows = torch.empty(heads, count, dim, dtype=dtype, device=device)
    matrix = None if rotation is None else rotation.float().mT.contiguous()
    variant = Variant(dim, dim // groups, dtype, packed.format, rotates=matrix is not None)
    kernel = cuda.compiled("dequantize", variant, device)
    codes, metadata = packed.codes, packed.metadata
    kernel(codes, Dequantize(codes, metadata, count, rotation=matrix, rows=rows))
    return rows
