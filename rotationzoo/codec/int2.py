"""The codec in plain torch, which defines what every faster implementation computes: clip, scale,
round, pack, and back.

A row is one token's keys or values of one KV head, `[..., D]`, already rotated. Everything is
float32 except the position of a clip threshold, which is float64. Each operation is rounded on its
own, without fused multiply-add, so that another implementation can agree bit by bit. `formats`
lists how engines store such rows. docs/codec.md has the formulas and a worked row.
"""

from typing import NamedTuple

import torch

from rotationzoo.codec.formats import FORMATS as FORMATS
from rotationzoo.codec.formats import SGLANG as SGLANG
from rotationzoo.codec.formats import SIMULATED as SIMULATED
from rotationzoo.codec.formats import Format as Format
from rotationzoo.errors import RotationZooError

CODE_BITS, LARGEST_CODE = 2, 3
LARGEST = 1e18
"""The largest magnitude that a row may have."""
SMALLEST_RANGE = 1e-8
"""The least range (maximum minus minimum) of a group, so that its scale is not zero."""
METADATA_TYPES = {"float32": torch.float32, "float16": torch.float16}
"""`Format.metadata` -> torch's type."""
_HALF_MAX, _HALF_TINY = 65504.0, 2.0**-24  # the largest and the smallest positive float16


class Quantized(NamedTuple):
    """`codes` are uint8 `[..., D]` from 0 to 3, or packed `[..., D / 4]`; `scale` and `offset`
    `[..., D / group]` have the format's type."""

    codes: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor


def quantize(
    rows: torch.Tensor,
    clip: float | torch.Tensor = 1.0,
    group_size: int | None = None,
    format: Format = SGLANG,
) -> Quantized:
    """Quantize rows `[..., D]` of any floating type to codes with their scales and offsets.

    `clip` is the clip ratio: a number, or a tensor that broadcasts to `[...]`, such as `[H, 1]`. A
    ratio of 1 turns clipping off. `group_size` channels share a scale; None means the whole row.
    Raises `RotationZooError` for rows that are not finite or above 1e18, for a ratio outside (0,
    1], and for a D that is not a multiple of 4 and of the group size.
    """
    dim = rows.shape[-1]
    group = group_size or dim
    check_shape(dim, group, format)
    rows = rows.float()
    check_values(rows)
    threshold = clip_threshold(rows, clip, format.interpolated).unsqueeze(-1)
    clamped = torch.clamp(rows, -threshold, threshold)
    groups = torch.unflatten(clamped, -1, (-1, group))
    scale, offset = metadata(groups.amin(-1), groups.amax(-1), format)
    step, start = scale.unsqueeze(-1), offset.unsqueeze(-1)
    steps = (groups - start) / step if format.offset == "minimum" else groups / step + start
    codes = (steps + 0.5).trunc().clamp(0, LARGEST_CODE).to(torch.uint8)
    return Quantized(
        codes.flatten(-2), store_metadata(scale, format), store_metadata(offset, format)
    )


def dequantize(quantized: Quantized, format: Format = SGLANG) -> torch.Tensor:
    """Restore rows `[..., D]`, float32."""
    codes = torch.unflatten(quantized.codes, -1, (quantized.scale.shape[-1], -1))
    scale, offset = (each.float().unsqueeze(-1) for each in quantized[1:])
    # In place, because a cache restores many rows at once.
    rows = codes.to(torch.float32, copy=True)
    if format.offset == "minimum":
        return rows.mul_(scale).add_(offset).flatten(-2)
    return rows.sub_(offset).mul_(scale).flatten(-2)


def pack(codes: torch.Tensor, format: Format) -> torch.Tensor:
    """Pack codes `[..., D]` into bytes `[..., D / 4]`."""
    check_shape(codes.shape[-1], codes.shape[-1], format)
    if format.packing == "strided":
        parts = torch.unflatten(codes, -1, (4, -1)).unbind(-2)
    else:
        parts = torch.unflatten(codes, -1, (-1, 4)).unbind(-1)
    first, second, third, fourth = parts
    return first | second << 2 | third << 4 | fourth << 6


def unpack(data: torch.Tensor, format: Format) -> torch.Tensor:
    """Unpack bytes `[..., D / 4]` into codes `[..., D]`; the inverse of `pack`."""
    codes = [data >> shift & LARGEST_CODE for shift in (0, 2, 4, 6)]
    axis = -2 if format.packing == "strided" else -1
    return torch.stack(codes, axis).flatten(-2)


def bits_per_element(dim: int, group_size: int | None = None, format: Format = SGLANG) -> float:
    """Average bits per quantized element: those of a code, and its share of a scale and offset."""
    return CODE_BITS + 2 * format.metadata_bits / (group_size or dim)


def check_nearest(format: Format) -> None:
    """Raise `RotationZooError` for a format whose rows have no nearest codes."""
    if format.offset == "none":
        problem = "rows of the format segments have codes of transform coding, and no nearest ones"
        raise RotationZooError(problem, hint="--format sglang")


def check_shape(dim: int, group: int, format: Format = SGLANG) -> None:
    """Raise `RotationZooError` as `check_nearest` does, and unless rows of `dim` channels pack into
    whole bytes and split into whole groups."""
    check_nearest(format)
    if dim % 4 or dim % group:
        raise RotationZooError(
            f"rows of {dim} channels do not divide by 4 and into groups of {group}"
        )


def find_refused(rows: torch.Tensor) -> torch.Tensor:
    """Which rows `[..., D]` are not finite or above `LARGEST`, boolean `[...]`."""
    # `not <=` instead of `>` also refuses NaN.
    return ~(rows.abs().amax(-1) <= LARGEST)


def check_values(rows: torch.Tensor) -> None:
    """Raise `RotationZooError` for rows that are not finite or above `LARGEST`."""
    if find_refused(rows).any():
        raise refusal()


def refusal() -> RotationZooError:
    """The error for rows that `find_refused` refuses."""
    problem = f"a row to be quantized is not finite or exceeds {LARGEST:.0e}"
    return RotationZooError(problem, hint="run the model with --dtype float32")


def metadata(
    low: torch.Tensor, high: torch.Tensor, format: Format
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale and offset of groups with these minima and maxima, rounded as they are stored, in
    float32. Codes are chosen with these.

    Divisors are tensors, because torch on a GPU turns division by a Python number into
    multiplication by its rounded reciprocal.
    """
    steps = low.new_full((), float(LARGEST_CODE))
    scale = (high - low).clamp(min=SMALLEST_RANGE) / steps
    if format.metadata == "float16":
        # Engines divide by a scale that underflows to zero, and store NaN.
        scale = scale.clamp(min=_HALF_TINY)
    scale = store_metadata(scale, format).float()
    # 0 - x and x + 0 make a minimum of zero +0, whose sign depends on the order of comparisons.
    offset = 0 - low / scale if format.offset == "zero" else low + 0
    return scale, store_metadata(offset, format).float()


def store_metadata(number: torch.Tensor, format: Format) -> torch.Tensor:
    """A scale or offset in the format's type. Values that overflow float16 become its largest
    number, so every row stays finite."""
    if format.metadata == "float16":
        number = number.clamp(-_HALF_MAX, _HALF_MAX)
    return number.to(METADATA_TYPES[format.metadata])


def clip_position(
    ratio: float | torch.Tensor, channels: int, interpolated: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the clip threshold lies among the ascending sorted magnitudes of `channels` channels:
    the index of its entry, int64, and the float32 weight of the next entry. Raises
    `RotationZooError` for a ratio outside (0, 1].

    The index is `min(floor(c D + 1e-6), D - 1)`, in float64 (1e-6 makes 0.92 x 100 count as 92).
    With `interpolated`, the threshold is the quantile c as `torch.quantile` defines it. A ratio of
    1 gives the largest magnitude, which clamps nothing.
    """
    ratio = torch.as_tensor(ratio, dtype=torch.float64)
    if not ((ratio > 0) & (ratio <= 1)).all():
        hint = "1 turns clipping off"
        raise RotationZooError("a clip ratio must be above 0 and at most 1", hint)
    if interpolated:
        position = ratio * (channels - 1)
    else:
        position = (ratio * channels + 1e-6).floor().clamp(max=channels - 1)
    return position.long(), (position - position.floor()).float()


def clip_threshold(
    rows: torch.Tensor, ratio: float | torch.Tensor, interpolated: bool = False
) -> torch.Tensor:
    """The magnitude `[...]` at which each row `[..., D]` is clamped: the entry of its sorted
    magnitudes at `clip_position`. `ratio` broadcasts to `[...]`."""
    dim = rows.shape[-1]
    position, between = clip_position(ratio, dim, interpolated)
    magnitudes = rows.abs()
    positions = position.flatten()
    if rows.numel() and not interpolated and (positions == positions[0]).all():
        # The usual case, one position for all rows: nothing is sorted or sent to the device.
        return magnitudes.kthvalue(int(positions[0]) + 1).values
    entry, weight = _expand(position, rows), _expand(between, rows)
    if rows.numel():  # `entry.min()` would fail on no rows
        # Only entries from the threshold up are needed: few of D at the usual ratios.
        magnitudes = magnitudes.topk(dim - int(entry.min())).values
    # `topk` sorts in descending order, so positions count from the other end.
    threshold = _take(magnitudes, dim - 1 - entry)
    if interpolated:
        above = _take(magnitudes, (dim - 2 - entry).clamp(min=0))
        threshold = threshold + weight * (above - threshold)
    return threshold


def _expand(positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """One number for each row `[...]` of `[..., D]`, on their device."""
    return positions.to(rows.device).expand(rows.shape[:-1])


def _take(sorted_rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """One entry `[...]` of each row `[..., D]`."""
    return sorted_rows.gather(-1, index.unsqueeze(-1)).squeeze(-1)
