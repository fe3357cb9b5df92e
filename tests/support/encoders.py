"""Rows and shapes with which the CUDA encoder is compared with its definition."""

import torch

from rotationzoo.checks.kernel import draw_rows, rows_of_each_type
from rotationzoo.codec.int2 import FORMATS

# Every type and format. Groups are the row, hold blocks of 16 channels, and split them.
SHAPES = [
    (80, 20, torch.float32, FORMATS["vllm"]), (128, 128, torch.bfloat16, FORMATS["sglang"]),
    (64, 4, torch.float16, FORMATS["sglang"]), (96, 32, torch.bfloat16, FORMATS["vllm"]),
    (320, 64, torch.float32, FORMATS["vllm"]),
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
