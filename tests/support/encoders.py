"""Rows, factors and shapes with which the CUDA encoders are compared with their definitions."""

from dataclasses import replace

import torch
from rotationzoo.linalg.error_feedback import factorize

from rotationzoo.checks.kernel import draw_rows, rows_of_each_type
from rotationzoo.codec import int2
from rotationzoo.codec.formats import FINE

SYMMETRIC = replace(FINE, fine_channels=0)
FORMATS = int2.FORMATS | {
    "fine": FINE,
    "one scale": SYMMETRIC,
    "4 bits": replace(SYMMETRIC, bits=4),
    "8 bits": replace(int2.FORMATS["vllm"], bits=8),
}
# Every type and format. Groups are the row, hold blocks of 16 channels, split them, and hold coarse
# and fine channels. Third bits are a whole row's, or end within a word of 32. Rows of 320 channels
# are too long for shared memory.
SHAPES = [
    (80, 20, torch.float32, FORMATS["vllm"]), (128, 128, torch.float32, FINE),
    (64, 64, torch.bfloat16, replace(SYMMETRIC, bits=4)),
    (128, 128, torch.bfloat16, FORMATS["sglang"]), (64, 4, torch.float16, FORMATS["sglang"]),
    (96, 32, torch.bfloat16, FORMATS["vllm"]), (320, 64, torch.float32, FORMATS["vllm"]),
    (320, 32, torch.float32, replace(FINE, fine_channels=240)),
    (128, 64, torch.bfloat16, replace(FINE, fine_channels=80)),
    (80, 80, torch.float32, replace(FINE, fine_channels=16)),
    (96, 96, torch.float32, replace(FINE, fine_channels=96)),
    (64, 32, torch.float32, replace(FINE, packing="consecutive")),
    (80, 80, torch.float16, SYMMETRIC), (80, 80, torch.float32, replace(SYMMETRIC, bits=8)),
    (128, 32, torch.float32, replace(int2.FORMATS["vllm"], bits=4)),
    (96, 96, torch.float32, replace(int2.SGLANG, bits=4)),
    (128, 32, torch.bfloat16, replace(int2.FORMATS["vllm"], bits=8)),
]  # fmt: skip


def sample(dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows `[5, N, D]` of this type behind edge rows: heavy tails, ties, magnitudes of all
    exponents, subnormal numbers, and a small range on a large offset."""
    generator = torch.Generator().manual_seed(dim)
    shape = 5, 16, dim
    normal = torch.randn(shape, generator=generator)
    ties = torch.randint(-6, 7, shape, generator=generator) / 2
    exponents = torch.randint(-120, 60, shape, generator=generator).float()
    subnormal = torch.randint(-50, 51, shape, generator=generator) * 2.0**-149
    heavy = draw_rows(None, 5, 16, dim, seed=dim)
    rows = torch.cat([heavy, ties, normal * exponents.exp2(), subnormal, 300 + normal], dim=1)
    return {typed.dtype: typed for typed in rows_of_each_type(rows)}[dtype]


def factors(dim: int) -> torch.Tensor:
    """Factors `[5, D, D]` of metrics: eigenvalues that fall like 1 / n, four directions alone, no
    direction, all channels alike, and channels of very different weight."""
    generator = torch.Generator().manual_seed(dim)
    normal = torch.randn(3 * dim, dim, generator=generator).double()
    basis = torch.linalg.qr(normal[:dim]).Q
    falling = basis @ torch.diag(1 / torch.arange(1, dim + 1)).double() @ basis.mT
    weighted = normal * torch.randn(dim, generator=generator).double().mul(2).exp()
    ones = torch.ones(dim, dim).double()
    few = normal[:4].mT @ normal[:4]
    return factorize(torch.stack([falling, few, 0 * ones, 1e20 * ones, weighted.mT @ weighted]))
