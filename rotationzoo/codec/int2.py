"""The codec: clip, scale, round, pack, and back. It is plain torch, and defines what every faster
implementation computes. Codes have 2 bits, or 3, 4 or 8 where a `Format` says so.

A row is one token's keys or values of one KV head, `[..., D]`, already rotated. Everything is
computed in float32. Each operation is rounded on its own, without fused multiply-add, so that
another implementation can agree bit by bit. `formats` lists how engines store such rows, and `clip`
decides at which magnitude a row is clamped. docs/codec.md has the formulas and a worked row.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rotationzoo.codec.clip import clip_threshold
from rotationzoo.codec.formats import FORMATS as FORMATS
from rotationzoo.codec.formats import SGLANG as SGLANG
from rotationzoo.codec.formats import SIMULATED as SIMULATED
from rotationzoo.codec.formats import Format as Format
from rotationzoo.codec.formats import Packing
from rotationzoo.errors import RotationZooError

LARGEST = 1e18
"""Rows must be finite and must not exceed this magnitude."""
SMALLEST_RANGE = 1e-8
"""A group's range (maximum minus minimum) counts as at least this, so that its scale is not
zero."""
METADATA_TYPES = {"float32": torch.float32, "float16": torch.float16}
"""`Format.metadata` -> torch's type."""
_HALF_MAX, _HALF_TINY = 65504.0, 2.0**-24  # the largest and the smallest positive float16


@dataclass(frozen=True)
class Quantized:
    """`codes` uint8 `[..., D]` are 0 to 3, or to the `largest_codes` of another format; `scale` and
    `offset` `[..., D / group]` have the format's type. `offset` is `[..., 0]` where the format
    stores none."""

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
    1], and for a D that is not a multiple of the group size and of the codes that share a word (4).
    """
    dim = rows.shape[-1]
    group = group_size or dim
    check_shape(dim, group, format)
    rows = rows.float()
    check_values(rows)
    threshold = clip_threshold(rows, clip, format.interpolated).unsqueeze(-1)
    clamped = torch.clamp(rows, -threshold, threshold)
    return encode(torch.unflatten(clamped, -1, (-1, group)), format)


def encode(groups: torch.Tensor, format: Format = SGLANG) -> Quantized:
    """Quantize float32 groups `[..., D / group, group]` that are already clamped."""
    scale, offset = metadata(groups.amin(-1), groups.amax(-1), format)
    group_scale, group_offset = spread(scale, offset, groups.shape[-1], format)
    largest = largest_codes(groups.shape[-2:], format, groups.device)
    codes = nearest_codes(groups, group_scale, group_offset, largest, format).to(torch.uint8)
    return Quantized(
        codes.flatten(-2), store_metadata(scale, format), store_metadata(offset, format)
    )


def nearest_codes(
    channels: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor,
    largest: torch.Tensor,
    format: Format,
) -> torch.Tensor:
    """The codes, float32, whose levels are nearest to channels with these scales and offsets."""
    steps = channels / scale + offset
    if format.offset == "minimum":
        steps = (channels - offset) / scale
    return (steps + 0.5).trunc().clamp(min=0).minimum(largest)


def dequantize(quantized: Quantized, format: Format = SGLANG) -> torch.Tensor:
    """Restore rows `[..., D]`, float32."""
    codes = torch.unflatten(quantized.codes, -1, (quantized.scale.shape[-1], -1))
    scale, offset = spread(quantized.scale, quantized.offset, codes.shape[-1], format)
    # In place where that can be: a cache restores many rows at once.
    rows = codes.to(torch.float32, copy=True)
    if format.offset == "minimum":
        return (rows * scale).add_(offset).flatten(-2)
    return (rows.sub_(offset) * scale).flatten(-2)


def spread(
    scale: torch.Tensor, offset: torch.Tensor, group: int, format: Format
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale and the offset of every channel, float32, from those of groups `[..., G]`; both
    broadcast to `[..., G, group]`. A format without an offset has its zero in the middle of the
    codes, and channels with one bit more have half the scale."""
    scale = scale.float().unsqueeze(-1)
    if format.offset != "none":
        return scale, offset.float().unsqueeze(-1)
    largest = largest_codes((scale.shape[-2], group), format, scale.device)
    return scale * ((format.largest_code + 1) / (largest + 1)), largest / 2


def largest_codes(shape: Sequence[int], format: Format, device: torch.device) -> torch.Tensor:
    """The largest code of each channel of a row, float32 `[G, group]`."""
    largest = torch.full(tuple(shape), float(format.largest_code), device=device)
    if format.fine_channels:
        largest.view(-1)[-format.fine_channels :] = 2 * format.largest_code + 1
    return largest


def pack(codes: torch.Tensor, format: Format) -> torch.Tensor:
    """Pack codes `[..., D]` into bytes `[..., format.row_bytes(D)]`."""
    dim, fine = codes.shape[-1], format.fine_channels
    check_shape(dim, dim, format)
    if not fine:
        return _pack(codes, format.packing, format.bits)
    high, low = codes.clone(), codes[..., -fine:] & 1
    high[..., -fine:] >>= 1
    return torch.cat([_pack(high, format.packing, format.bits), _pack(low, "consecutive", 1)], -1)


def unpack(data: torch.Tensor, format: Format) -> torch.Tensor:
    """Unpack bytes `[..., format.row_bytes(D)]` into codes `[..., D]`; the inverse of `pack`."""
    fine = format.fine_channels
    if not fine:
        return _unpack(data, format.packing, format.bits)
    codes = _unpack(data[..., : -fine // 8], format.packing, format.bits)
    codes[..., -fine:] *= 2
    codes[..., -fine:] += _unpack(data[..., -fine // 8 :], "consecutive", 1)
    return codes


def _pack(codes: torch.Tensor, packing: Packing, bits: int) -> torch.Tensor:
    count, size = _word(bits)
    # A word of several bytes is put together as a number, and cut into bytes again.
    codes = codes if size == 1 else codes.int()
    if packing == "strided":
        parts = torch.unflatten(codes, -1, (count, -1)).unbind(-2)
    else:
        parts = torch.unflatten(codes, -1, (-1, count)).unbind(-1)
    words = parts[0]
    for place, part in enumerate(parts[1:], start=1):
        words = words | part << bits * place
    if size == 1:
        return words
    data = [words >> 8 * place & 255 for place in range(size)]
    return torch.stack(data, -1).flatten(-2).to(torch.uint8)


def _unpack(data: torch.Tensor, packing: Packing, bits: int) -> torch.Tensor:
    count, size = _word(bits)
    words, mask = data, (1 << bits) - 1
    if size > 1:
        words, *higher = torch.unflatten(data.int(), -1, (-1, size)).unbind(-1)
        for place, part in enumerate(higher, start=1):
            words = words | part << 8 * place
    codes = [words >> bits * place & mask for place in range(count)]
    return torch.stack(codes, -2 if packing == "strided" else -1).flatten(-2).to(torch.uint8)


def bits_per_element(dim: int, group_size: int | None = None, format: Format = SGLANG) -> float:
    """Average bits per quantized element: the bits of a code and its share of the group's scale and
    offset. `codec.size` counts exact tokens, too."""
    metadata = format.metadata_numbers * format.metadata_bits
    return format.bits + format.fine_channels / dim + metadata / (group_size or dim)


def check_shape(dim: int, group: int, format: Format = SGLANG) -> None:
    """Raise `RotationZooError` unless rows of `dim` channels pack into whole words, split into
    whole groups and have as many channels as the format gives a bit more."""
    count, _ = _word(format.bits)
    if dim % count or dim % group:
        raise RotationZooError(
            f"rows of {dim} channels do not divide by {count} and into groups of {group}"
        )
    if dim < format.fine_channels:
        problem = f"rows of {dim} channels have no {format.fine_channels} of three bits"
        hint = "--format sglang"
        raise RotationZooError(problem, hint)


def _word(bits: int) -> tuple[int, int]:
    """How many codes share a word, and how many bytes it has."""
    together = math.lcm(bits, 8)
    return together // bits, together // 8


def find_refused(rows: torch.Tensor) -> torch.Tensor:
    """Which rows `[..., D]` are not finite or above `LARGEST`, boolean `[...]`."""
    # `not <=` instead of `>`, so that NaN is refused, too.
    return ~(rows.abs().amax(-1) <= LARGEST)


def check_values(rows: torch.Tensor) -> None:
    """Raise `RotationZooError` for rows that are not finite or above `LARGEST`."""
    if find_refused(rows).any():
        raise refusal()


def refusal() -> RotationZooError:
    """What is said of such rows."""
    problem = f"a row to be quantized is not finite or exceeds {LARGEST:.0e}"
    return RotationZooError(problem, hint="run the model with --dtype float32")


def metadata(
    low: torch.Tensor, high: torch.Tensor, format: Format
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale and offset of groups of these minima and maxima as they are stored, in float32:
    codes are rounded with these.

    Divisors are tensors. On a GPU, torch turns division by a Python number into multiplication by
    its rounded reciprocal.
    """
    steps = low.new_full((), float(format.largest_code))
    if format.offset == "none":
        # The levels of the outermost codes lie half a step inside the range.
        high = torch.maximum(-low, high)
        low, steps = -high, steps + 1
    scale = (high - low).clamp(min=SMALLEST_RANGE) / steps
    if format.metadata == "float16":
        # A scale that underflows to zero would be a divisor; engines then store rows of NaN.
        scale = scale.clamp(min=_HALF_TINY)
    scale = store_metadata(scale, format).float()
    if format.offset == "none":
        return scale, scale[..., :0]
    # 0 - x and x + 0 rather than -x and x: depending on the order of the comparisons, a minimum of
    # zero is +0 or -0, and this makes both +0.
    offset = 0 - low / scale if format.offset == "zero" else low + 0
    return scale, store_metadata(offset, format).float()


def store_metadata(number: torch.Tensor, format: Format) -> torch.Tensor:
    """A scale or an offset in the format's type. Values that overflow float16 become its largest
    number, which keeps every row finite."""
    if format.metadata == "float16":
        number = number.clamp(-_HALF_MAX, _HALF_MAX)
    return number.to(METADATA_TYPES[format.metadata])
