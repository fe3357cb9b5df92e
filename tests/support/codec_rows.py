"""Rows to quantize, drawn by hypothesis."""

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

RATIOS = st.sampled_from([1.0, 0.96, 0.92, 0.5, 0.03])
many = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])


@st.composite
def shapes(draw) -> tuple[int, int]:
    """Row length and group size."""
    dim = draw(st.sampled_from([8, 16, 48, 64, 80, 128]))
    divisors = [size for size in range(4, dim + 1, 4) if dim % size == 0]
    return dim, draw(st.sampled_from(divisors))


@st.composite
def rows(draw, largest: float = 100.0) -> tuple[torch.Tensor, int]:
    """A few rows `[N, D]` with ties, zeros and subnormals among them, and a group size."""
    dim, group = draw(shapes())
    count = draw(st.integers(1, 3))
    values = st.floats(-largest, largest, width=32)
    return torch.from_numpy(draw(arrays(np.float32, (count, dim), elements=values))), group


def largest(rows: torch.Tensor) -> torch.Tensor:
    """The largest magnitude `[..., 1]` of each row."""
    return rows.abs().amax(-1, keepdim=True)
