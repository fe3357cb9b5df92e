"""The 2-bit codec: clip, scale, round, pack, and back. Plain torch, and the definition of every
faster implementation.

A row is one token's keys or values of one KV head, `[..., D]`, already rotated. Everything is
computed in float32, each operation rounded on its own (no fused multiply-add), so that another
implementation can agree bit by bit. The engines that store such rows differ in details, which
`formats` lists; at which magnitude a row is clamped is decided in `clip`. The names of both can be
used from here. docs/codec.md has the formulas side by side and a worked row.
"""

from dataclasses import dataclass

import torch

from rotationzoo.codec.clip import (
    bisected_threshold,
    clip_position,
    clip_threshold,
    group_threshold,
)
from rotationzoo.codec.formats import FORMATS, SGLANG, SIMULATED, Format, Packing
from rotationzoo.errors import RotationZooError

__all__ = [
    "FORMATS",
    "LARGEST",
    "METADATA_TYPES",
    "SGLANG",
    "SIMULATED",
    "SMALLEST_RANGE",
    "Format",
    "Quantized",
    "bisected_threshold",
    "bits_per_element",
    "check_shape",
    "clip_position",
    "clip_threshold",
    "dequantize",
    "encode",
    "group_threshold",
    "pack",
    "quantize",
    "round_trip",
    "unpack",
]

LARGEST = 1e18
"""Rows must be finite and of at most this magnitude."""
SMALLEST_RANGE = 1e-8
"""A group's range counts as at least this."""
METADATA_TYPES = {"float32": torch.float32, "float16": torch.float16}
"""Torch's types for `Format.metadata`."""
_HALF_MAX, _HALF_TINY = 65504.0, 2.0**-24  # the largest and the smallest positive float16
_HALF_INTEGERS = 32768.0  # a zero up to here leaves float16 the integers beside it


@dataclass(frozen=True)
class Quantized:
    """`codes` uint8 `[..., D]` from 0 to 3; `scale` and `offset` `[..., D / group]` in the format's
    type."""

    codes: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor


def quantize(
    rows: torch.Tensor,
    clip: float | torch.Tensor = 1.0,
    group_size: int | None = None,
    format: Format = SGLANG,
) -> Quantized:
    """Rows `[..., D]` of any floating type -> codes with their scales and offsets.

    `clip` is the clip ratio, a number or a tensor that broadcasts to `[...]`, such as `[H, 1]`; 1
    is off. `group_size` channels share a scale, None is the whole row. Raises `RotationZooError`
    for rows that are not finite or above 1e18, for a ratio outside (0, 1] and for a D that does not
    divide by 4 or by the group.
    """
    dim = rows.shape[-1]
    group = group_size or dim
    check_shape(dim, group)
    rows = rows.float()
    _check_values(rows)
    groups = torch.unflatten(rows, -1, (-1, group))
    threshold = group_threshold(groups, clip, format)
    return encode(torch.clamp(groups, -threshold, threshold), format)


def encode(groups: torch.Tensor, format: Format = SGLANG) -> Quantized:
    """Groups `[..., D / group, group]` float32, already clamped, -> codes with their scales and
    offsets."""
    scale, offset = _metadata(groups.amin(-1), groups.amax(-1), format)
    group_scale, group_offset = scale.unsqueeze(-1), offset.unsqueeze(-1)
    if format.offset == "zero":
        steps = groups / group_scale + group_offset
    else:
        steps = (groups - group_offset) / group_scale
    codes = (steps + 0.5).trunc().clamp(0, 3).to(torch.uint8)
    return Quantized(codes.flatten(-2), _store(scale, format), _store(offset, format))


def dequantize(quantized: Quantized, format: Format = SGLANG) -> torch.Tensor:
    """Float32 rows `[..., D]`."""
    scale, offset = quantized.scale.float().unsqueeze(-1), quantized.offset.float().unsqueeze(-1)
    codes = torch.unflatten(quantized.codes, -1, (scale.shape[-2], -1)).float()
    if format.offset == "zero":
        return ((codes - offset) * scale).flatten(-2)
    return (codes * scale + offset).flatten(-2)


def round_trip(
    rows: torch.Tensor,
    clip: float | torch.Tensor = 1.0,
    group_size: int | None = None,
    format: Format = SGLANG,
) -> torch.Tensor:
    """What reading a stored row gives back, float32 `[..., D]`; arguments as in `quantize`."""
    return dequantize(quantize(rows, clip, group_size, format), format)


def pack(codes: torch.Tensor, packing: Packing) -> torch.Tensor:
    """Codes `[..., D]` -> bytes `[..., D / 4]`."""
    check_shape(codes.shape[-1], codes.shape[-1])
    if packing == "strided":
        quarters = torch.unflatten(codes, -1, (4, -1)).unbind(-2)
    else:
        quarters = torch.unflatten(codes, -1, (-1, 4)).unbind(-1)
    lowest, low, high, highest = quarters
    return lowest | low << 2 | high << 4 | highest << 6


def unpack(data: torch.Tensor, packing: Packing) -> torch.Tensor:
    """Bytes `[..., D / 4]` -> codes `[..., D]`; the inverse of `pack`."""
    quarters = [data >> shift & 3 for shift in (0, 2, 4, 6)]
    return torch.stack(quarters, -2 if packing == "strided" else -1).flatten(-2)


def bits_per_element(
    dim: int,
    group_size: int | None = None,
    format: Format = SGLANG,
    *,
    context: int = 0,
    sink: int = 0,
    recent: int = 0,
) -> float:
    """Bits that a cached element costs: 2, its share of the group's scale and offset, and of the
    tokens that are kept in bfloat16.

    `context` tokens are cached, of which the first `sink` and the last `recent` are exact; 0 counts
    no exact tokens.
    """
    quantized = 2 + 2 * format.metadata_bits / (group_size or dim)
    if not context:
        return quantized
    exact = min(context, sink + recent) / context
    return 16 * exact + quantized * (1 - exact)


def check_shape(dim: int, group: int) -> None:
    """Raise `RotationZooError` unless rows of `dim` channels pack into bytes and split into
    groups."""
    if dim % 4 or dim % group:
        raise RotationZooError(
            f"rows of {dim} channels do not divide by 4 and into groups of {group}"
        )


def _check_values(rows: torch.Tensor) -> None:
    # `not <=`, so that NaN is refused too.
    if rows.numel() and not rows.abs().amax() <= LARGEST:
        raise RotationZooError(
            f"a row to be quantized is not finite or exceeds {LARGEST:.0e}",
            hint="run the model with --dtype float32",
        )


def _metadata(
    low: torch.Tensor, high: torch.Tensor, format: Format
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and offset, float32, with which the codes of groups with these extremes are rounded.

    Divisors are tensors: where the divisor is a Python number, torch multiplies by its rounded
    reciprocal on a GPU.
    """
    three = low.new_full((), 3.0)
    scale = (high - low).clamp(min=SMALLEST_RANGE) / three
    if format.metadata == "float16":
        if format.offset == "zero":
            # A zero beyond float16's integers would lose the codes.
            scale = torch.maximum(scale, low.abs() / low.new_full((), _HALF_INTEGERS))
        if format.rounded_with == "stored":
            # A scale that underflows would be divided by; engines then store rows of NaN.
            scale = scale.clamp(min=_HALF_TINY)
    scale = _for_rounding(scale, format)
    # 0 - x and x + 0 rather than -x and x: the sign of a zero minimum depends on the order of the
    # comparisons.
    offset = 0 - low / scale if format.offset == "zero" else low + 0
    return scale, _for_rounding(offset, format)


def _for_rounding(number: torch.Tensor, format: Format) -> torch.Tensor:
    """A scale or an offset, float32, as the format rounds codes with it."""
    return _store(number, format).float() if format.rounded_with == "stored" else number


def _store(number: torch.Tensor, format: Format) -> torch.Tensor:
    """A scale or an offset in the format's type. Where float16 overflows, its largest number is
    stored, which keeps every row finite."""
    if format.metadata == "float16":
        number = number.clamp(-_HALF_MAX, _HALF_MAX)
    return number.to(METADATA_TYPES[format.metadata])
