"""The codec: clip, scale, round, pack, and back. It is plain torch, and defines what every faster
implementation computes. Codes have 2 bits, or 3 or 4 where a `Format` says so.

A row is one token's keys or values of one KV head, `[..., D]`, already rotated. Everything is
computed in float32. Each operation is rounded on its own, without fused multiply-add, so that
another implementation can agree bit by bit. `formats` lists how engines store such rows, and `clip`
decides at which magnitude a row is clamped. docs/codec.md has the formulas and a worked row.
"""

from typing import NamedTuple

import torch

from rotationzoo.codec.clip import clip_threshold
from rotationzoo.codec.formats import CODE_BITS, LARGEST_CODE
from rotationzoo.codec.formats import FORMATS as FORMATS
from rotationzoo.codec.formats import SGLANG as SGLANG
from rotationzoo.codec.formats import SIMULATED as SIMULATED
from rotationzoo.codec.formats import Format as Format
from rotationzoo.errors import RotationZooError

LARGEST = 1e18
"""Rows must be finite and must not exceed this magnitude."""
SMALLEST_RANGE = 1e-8
"""A group's range (maximum minus minimum) counts as at least this, so that its scale is not
zero."""
METADATA_TYPES = {"float32": torch.float32, "float16": torch.float16}
"""`Format.metadata` -> torch's type."""
_HALF_MAX, _HALF_TINY = 65504.0, 2.0**-24  # the largest and the smallest positive float16


class Quantized(NamedTuple):
    """`codes` uint8 `[..., D]` are 0 to 3, or to the largest code of another format, or as `pack`
    returns them; `scale` and `offset` `[..., D / group]` have the format's type."""

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
    step, start = scale.unsqueeze(-1), offset.unsqueeze(-1)
    steps = (groups - start) / step if format.offset == "minimum" else groups / step + start
    codes = (steps + 0.5).trunc().clamp(0, LARGEST_CODE).to(torch.uint8)
    return Quantized(
        codes.flatten(-2), store_metadata(scale, format), store_metadata(offset, format)
    )


def dequantize(quantized: Quantized, format: Format = SGLANG) -> torch.Tensor:
    """Restore rows `[..., D]`, float32."""
    codes = torch.unflatten(quantized.codes, -1, (quantized.scale.shape[-1], -1))
    numbers = quantized.scale, quantized.offset
    scale, offset = (number.float().unsqueeze(-1) for number in numbers)
    # In place where that can be: a cache restores many rows at once.
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
    """Average bits per quantized element: the bits of a code and its share of the group's scale and
    offset. `codec.size` counts exact tokens, too."""
    return CODE_BITS + 2 * format.metadata_bits / (group_size or dim)


def check_nearest(format: Format) -> None:
    """Raise `RotationZooError` for a format whose rows have no nearest codes."""
    if format.offset == "none":
        problem = "rows of the format segments have codes of transform coding, and no nearest ones"
        raise RotationZooError(problem, hint="--format sglang")


def check_shape(dim: int, group: int, format: Format = SGLANG) -> None:
    """Raise `RotationZooError` unless rows of `dim` channels pack into whole bytes and split into
    whole groups; and as `check_nearest`."""
    check_nearest(format)
    if dim % 4 or dim % group:
        raise RotationZooError(
            f"rows of {dim} channels do not divide by 4 and into groups of {group}"
        )


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
    steps = low.new_full((), float(LARGEST_CODE))
    scale = (high - low).clamp(min=SMALLEST_RANGE) / steps
    if format.metadata == "float16":
        # A scale that underflows to zero would be a divisor; engines then store rows of NaN.
        scale = scale.clamp(min=_HALF_TINY)
    scale = store_metadata(scale, format).float()
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
