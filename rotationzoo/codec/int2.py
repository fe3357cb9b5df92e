"""The 2-bit codec: clip, scale, round, pack, and back. Plain torch, and the definition of every
faster implementation.

A row is one token's keys or values of one KV head, `[..., D]`, already rotated. Everything is
computed in float32, each operation rounded on its own (no fused multiply-add), so that another
implementation can agree bit by bit. The engines that store such rows differ in details; `FORMATS`
names them. docs/codec.md has the formulas side by side and a worked row.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch

from rotationzoo.errors import RotationZooError

LARGEST = 1e18
"""Rows must be finite and of at most this magnitude."""
_BISECTED = 64  # channels from which on SGLang's kernels bisect
SMALLEST_RANGE = 1e-8
"""A group's range counts as at least this."""
_HALF_MAX, _HALF_TINY = 65504.0, 2.0**-24  # the largest and the smallest positive float16


@dataclass(frozen=True)
class Format:
    """What tells one engine's 2-bit rows from another's."""

    clip_scope: Literal["row", "group"]
    """Whether the clip threshold is found among all D channels of a row, or in each quantization
    group."""
    interpolated: bool
    """Whether the threshold is interpolated between two channels, or one channel's magnitude."""
    metadata: torch.dtype
    """Type in which a group's scale and offset are stored."""
    offset: Literal["zero", "minimum"]
    """`zero`: values are `(code - zero) * scale`; `minimum`: `code * scale + minimum`."""
    packing: Literal["strided", "consecutive"]
    """Byte i holds the codes of channels i, i + D/4, i + D/2 and i + 3D/4, or of 4i to 4i + 3;
    lowest bits first."""
    rounded_with: Literal["stored", "computed"] = "stored"
    """Whether codes are rounded with the scale and offset as they are stored, or as they were
    computed in float32 before."""
    bisected: bool = False
    """Whether the threshold is the one that SGLang's bisecting kernels take, as
    `bisected_threshold` has it."""


FORMATS = {
    "sglang": Format("row", False, torch.float32, "zero", "strided"),
    "vllm": Format("row", True, torch.float16, "minimum", "consecutive"),
    "mlx": Format("group", False, torch.float16, "zero", "consecutive", "computed"),
}
SGLANG = FORMATS["sglang"]
SIMULATED = FORMATS | {"sglang-bisected": replace(SGLANG, bisected=True)}
"""The formats that a model can be evaluated with. SGLang sorts a row while it prefills, and bisects
where it stores the tokens that leave the exact window; which of them a server's answer depends on
more is decided by how long it decodes."""


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
    groups = rows.unflatten(-1, (-1, group))
    threshold = group_threshold(groups, clip, format)
    return encode(torch.clamp(groups, -threshold, threshold), format)


def encode(groups: torch.Tensor, format: Format = SGLANG) -> Quantized:
    """Groups `[..., D / group, group]` float32, already clamped, -> codes with their scales and
    offsets."""
    scale, offset = _metadata(groups.amin(-1), groups.amax(-1), format)
    s, o = scale.unsqueeze(-1), offset.unsqueeze(-1)
    steps = groups / s + o if format.offset == "zero" else (groups - o) / s
    codes = (steps + 0.5).trunc().clamp(0, 3).to(torch.uint8)
    return Quantized(codes.flatten(-2), _stored(scale, format), _stored(offset, format))


def dequantize(quantized: Quantized, format: Format = SGLANG) -> torch.Tensor:
    """Float32 rows `[..., D]`."""
    scale, offset = quantized.scale.float().unsqueeze(-1), quantized.offset.float().unsqueeze(-1)
    codes = quantized.codes.unflatten(-1, (scale.shape[-2], -1)).float()
    rows = (codes - offset) * scale if format.offset == "zero" else codes * scale + offset
    return rows.flatten(-2)


def clip_position(
    ratio: float | torch.Tensor, channels: int, interpolated: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the clip threshold is among the ascending sorted magnitudes of so many channels: entry
    int64, and the float32 weight of the next one. Raises `RotationZooError` for a ratio outside (0,
    1].

    Entry `min(floor(c D + 1e-6), D - 1)`, computed in float64 (the 1e-6 makes .92 x 100 count as
    92); interpolated, the quantile c as torch.quantile defines it. A ratio of 1 is the largest
    magnitude, which clamps nothing.
    """
    ratio = torch.as_tensor(ratio, dtype=torch.float64)
    if not ((ratio > 0) & (ratio <= 1)).all():
        raise RotationZooError(
            "a clip ratio must be above 0 and at most 1", hint="1 turns clipping off"
        )
    position = (
        ratio * (channels - 1)
        if interpolated
        else (ratio * channels + 1e-6).floor().clamp(max=channels - 1)
    )
    return position.long(), (position - position.floor()).float()


def clip_threshold(
    rows: torch.Tensor, ratio: float | torch.Tensor, interpolated: bool = False
) -> torch.Tensor:
    """The magnitude `[...]` at which each row `[..., D]` is clamped."""
    dim = rows.shape[-1]
    below, weight = (
        t.to(rows.device).expand(rows.shape[:-1]) for t in clip_position(ratio, dim, interpolated)
    )
    # Descending, and only as far as needed: for the usual ratios a few of D.
    largest = rows.abs().topk(dim - int(below.min())).values if rows.numel() else rows.abs()
    threshold = _entry(largest, dim - 1 - below)
    if interpolated:
        above = _entry(largest, (dim - 2 - below).clamp(min=0))
        threshold = threshold + weight * (above - threshold)
    return threshold


def bisected_threshold(rows: torch.Tensor, ratio: float | torch.Tensor) -> torch.Tensor:
    """The magnitude `[...]` at which SGLang's `gpu_flush_int2.py` clamps each row `[..., D]` of 64
    channels and more: the upper end of the range from 0 to the row's maximum after log2(D) halvings
    at its middle, each of which keeps the half in which at most `D - floor(c D)` magnitudes are
    above. Shorter rows are sorted, and a ratio of 1 clamps nothing."""
    dim = rows.shape[-1]
    if dim < _BISECTED:
        return clip_threshold(rows, ratio)
    entry, _ = (t.to(rows.device).expand(rows.shape[:-1]) for t in clip_position(ratio, dim))
    magnitudes = rows.abs()
    high = magnitudes.amax(-1)
    low = torch.zeros_like(high)
    largest = high
    for _ in range(dim.bit_length() - 1):
        middle = (low + high) * 0.5
        too_many = (magnitudes > middle.unsqueeze(-1)).sum(-1) > dim - entry
        low, high = torch.where(too_many, middle, low), torch.where(too_many, high, middle)
    return torch.where(entry == dim - 1, largest, high)


def group_threshold(
    groups: torch.Tensor, clip: float | torch.Tensor, format: Format
) -> torch.Tensor:
    """Where groups `[..., D / group, group]` are clamped, `[..., D / group or 1, 1]`; `clip` as in
    `quantize`."""
    if format.bisected:
        return bisected_threshold(groups.flatten(-2), clip)[..., None, None]
    if format.clip_scope == "row":
        return clip_threshold(groups.flatten(-2), clip, format.interpolated)[..., None, None]
    ratio = clip.unsqueeze(-1) if isinstance(clip, torch.Tensor) else clip
    return clip_threshold(groups, ratio, format.interpolated)[..., None]


def pack(codes: torch.Tensor, packing: Literal["strided", "consecutive"]) -> torch.Tensor:
    """Codes `[..., D]` -> bytes `[..., D / 4]`."""
    check_shape(codes.shape[-1], codes.shape[-1])
    parts = codes.unflatten(-1, (4, -1) if packing == "strided" else (-1, 4))
    one, two, three, four = parts.unbind(-2 if packing == "strided" else -1)
    return one | two << 2 | three << 4 | four << 6


def unpack(data: torch.Tensor, packing: Literal["strided", "consecutive"]) -> torch.Tensor:
    """Bytes `[..., D / 4]` -> codes `[..., D]`; the inverse of `pack`."""
    parts = [data >> shift & 3 for shift in (0, 2, 4, 6)]
    return torch.stack(parts, -2 if packing == "strided" else -1).flatten(-2)


def round_trip(
    rows: torch.Tensor,
    clip: float | torch.Tensor = 1.0,
    group_size: int | None = None,
    format: Format = SGLANG,
) -> torch.Tensor:
    """What reading a stored row gives back, float32 `[..., D]`; arguments as in `quantize`."""
    return dequantize(quantize(rows, clip, group_size, format), format)


def bits_per_element(
    dim: int,
    group_size: int | None = None,
    format: Format = SGLANG,
    *,
    context: int = 0,
    sink: int = 0,
    recent: int = 0,
) -> float:
    """Bits that a cached element costs: 2, the group's scale and offset, and the tokens kept in
    bfloat16.

    `context` tokens are cached, of which the first `sink` and the last `recent` are exact; 0 counts
    no exact tokens.
    """
    stored = 2 + 2 * format.metadata.itemsize * 8 / (group_size or dim)
    if not context:
        return stored
    exact = min(context, sink + recent) / context
    return 16 * exact + stored * (1 - exact)


def check_shape(dim: int, group: int) -> None:
    """Raise `RotationZooError` unless rows of `dim` channels pack into bytes and split into
    groups."""
    if dim % 4 or dim % group:
        raise RotationZooError(
            f"rows of {dim} channels do not divide by 4 and into groups of {group}"
        )


def _check_values(rows: torch.Tensor) -> None:
    if rows.numel() and not rows.abs().amax() <= LARGEST:
        raise RotationZooError(
            f"a row to be quantized is not finite or exceeds {LARGEST:.0e}",
            hint="run the model with --dtype float32",
        )


def _metadata(
    low: torch.Tensor, high: torch.Tensor, format: Format
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and offset of groups with these extremes, float32, as codes are rounded with them.

    Division by three is by a tensor: torch multiplies by a rounded 1/3 on a GPU where the divisor
    is a Python number.
    """
    three = low.new_full((), 3.0)
    scale = (high - low).clamp(min=SMALLEST_RANGE) / three
    if format.metadata == torch.float16:
        if format.offset == "zero":  # a zero beyond float16's integers would lose the codes
            scale = torch.maximum(scale, low.abs() / low.new_full((), 32768.0))
        if (
            format.rounded_with == "stored"
        ):  # a scale that underflows is divided by: into rows of NaN where engines do it
            scale = scale.clamp(min=_HALF_TINY)
    scale = _rounding(scale, format)
    # 0 - x and x + 0 rather than -x and x: the sign of a zero minimum depends on the order of the
    # comparisons.
    return scale, _rounding(0 - low / scale if format.offset == "zero" else low + 0, format)


def _rounding(number: torch.Tensor, format: Format) -> torch.Tensor:
    return _stored(number, format).float() if format.rounded_with == "stored" else number


def _stored(number: torch.Tensor, format: Format) -> torch.Tensor:
    """A scale or an offset in the format's type. Where float16 overflows, its largest number, which
    keeps every row finite."""
    if format.metadata == torch.float16:
        number = number.clamp(-_HALF_MAX, _HALF_MAX)
    return number.to(format.metadata)


def _entry(ordered: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return ordered.gather(-1, index.unsqueeze(-1)).squeeze(-1)
