"""Rows whose channels have 0 to 8 bits each: from rows to bytes, and back, in plain torch.

A row of one KV head is turned into channels (`linalg.transform_coding`), the widest first. Every
channel has a step of its own, and the row has one of eight scales, which multiplies all steps: the
one that leaves the smallest squared error. Its number takes the first three bits of the row, and
the codes follow, one after another, lowest bits first, without gaps. The level of a code of w bits
is `(code + 1/2 - 2^(w-1)) * step * scale`: there is no offset.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property

import torch

from rotationzoo.codec.int2 import check_values
from rotationzoo.linalg.transform_coding import SCALE_BITS, STEPS, UNIT, Transform

SCALES = tuple(0.5 * 5.6 ** (number / 7) for number in range(1 << SCALE_BITS))
"""From 0.5 to 2.8, in equal ratios."""


@dataclass(frozen=True)
class CodedSide:
    """How one side of a layer is stored."""

    forward: torch.Tensor
    """`[H, D, D]`, float32: centered rows times this are channels."""
    inverse: torch.Tensor
    """`[H, D, D]`, float32."""
    mean: torch.Tensor
    """`[H, D]`, float32."""
    steps: torch.Tensor
    """`[H, D]`, float32; 0 for channels without bits."""
    widths: torch.Tensor
    """Bits of the channels, int64 `[H, D]`, descending."""

    @classmethod
    def of(cls, transform: Transform, mean: torch.Tensor, widths: torch.Tensor) -> "CodedSide":
        """The side of a transform whose channels have these bits."""
        steps = torch.tensor(STEPS, dtype=torch.float64)[widths] * transform.deviations
        tensors = transform.forward, transform.inverse, mean, steps
        forward, inverse, mean, steps = (each.float().contiguous() for each in tensors)
        return cls(forward, inverse, mean, steps, widths)

    @cached_property
    def row_bytes(self) -> list[int]:
        """Bytes of a row of each head: none where no channel has bits."""
        taken = self.widths.sum(-1)
        units = (taken + SCALE_BITS + UNIT - 1) // UNIT * (taken > 0)
        sizes: list[int] = (units * (UNIT // 8)).tolist()
        return sizes

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """The bytes `[B, T, bytes]` of rows `[B, H, T, D]`, head after head. Raises
        `RotationZooError` for rows that are not finite or above 1e18."""
        check_values(rows)
        codes, scale = self._choose(self._channels(rows))
        return pack(codes, scale, self)

    def decode(self, data: torch.Tensor) -> torch.Tensor:
        """The rows `[B, H, T, D]`, float32, of bytes `[B, T, bytes]`."""
        codes, scale = unpack(data, self)
        return self._levels(codes, scale) @ self.inverse + self.mean[:, None]

    def read(self, rows: torch.Tensor) -> torch.Tensor:
        """What `decode` returns for what `encode` stores, without the bytes."""
        check_values(rows)
        stored = self._levels(*self._choose(self._channels(rows)))
        return stored @ self.inverse + self.mean[:, None]

    def to(self, device: torch.device) -> "CodedSide":
        """The same on a device."""
        return CodedSide(
            **{each.name: getattr(self, each.name).to(device) for each in fields(self)}
        )

    def _channels(self, rows: torch.Tensor) -> torch.Tensor:
        return (rows.float() - self.mean[:, None]) @ self.forward

    def _choose(self, channels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The codes `[B, H, T, D]` and the numbers of scales `[B, H, T]`, both uint8."""
        losses = []
        for number in range(len(SCALES)):
            scale = channels.new_full(channels.shape[:3], number)
            read = self._levels(self._codes(channels, scale), scale)
            losses.append((read - channels).square().sum(-1))
        best = torch.stack(losses).argmin(0)
        return self._codes(channels, best).to(torch.uint8), best.to(torch.uint8)

    def _codes(self, channels: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        half, steps = self._half, self._scaled_steps(scale)
        places = (channels / steps.where(steps > 0, 1)).floor()
        return (places.maximum(-half).minimum(half - 1) + half) * (self.widths > 0)[:, None]

    def _levels(self, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (codes.float() + 0.5 - self._half) * self._scaled_steps(scale)

    @property
    def _half(self) -> torch.Tensor:
        """Half of the number of codes of each channel, `[H, 1, D]`."""
        return (1 << self.widths).float()[:, None] / 2

    def _scaled_steps(self, scale: torch.Tensor) -> torch.Tensor:
        """The steps `[B, H, T, D]` of rows with these numbers of scales `[B, H, T]`."""
        scales = torch.tensor(SCALES, device=scale.device)[scale.long()]
        return self.steps[:, None] * scales[..., None]


def pack(codes: torch.Tensor, scale: torch.Tensor, side: CodedSide) -> torch.Tensor:
    """The bytes `[B, T, bytes]` of codes `[B, H, T, D]` and numbers of scales `[B, H, T]`."""
    parts = [codes.new_empty(len(codes), codes.shape[2], 0)]
    for head, size in enumerate(side.row_bytes):
        if size:
            fields = torch.cat([scale[:, head, :, None], codes[:, head]], dim=-1)
            field, place = _bit_places(side.widths[head])
            bits = fields[..., field] >> place & 1
            missing = bits.new_zeros(*bits.shape[:2], 8 * size - len(field))
            octets = torch.cat([bits, missing], dim=-1).unflatten(-1, (-1, 8))
            powers = 1 << torch.arange(8, device=codes.device)
            parts.append((octets * powers).sum(-1).to(torch.uint8))
    return torch.cat(parts, dim=-1)


def unpack(data: torch.Tensor, side: CodedSide) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes `[B, H, T, D]` and numbers of scales `[B, H, T]` of bytes `[B, T, bytes]`."""
    batch, tokens = data.shape[:2]
    heads, dim = side.widths.shape
    found = torch.zeros(batch, heads, tokens, dim + 1, dtype=torch.int64, device=data.device)
    for head, row in enumerate(data.split(side.row_bytes, dim=-1)):
        if row.shape[-1]:
            field, place = _bit_places(side.widths[head])
            bits = (row[..., None] >> torch.arange(8, device=data.device) & 1).flatten(-2)
            found[:, head].index_add_(-1, field, bits[..., : len(field)].long() << place)
    return found[..., 1:].to(torch.uint8), found[..., 0].to(torch.uint8)


def _bit_places(widths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each bit of a row with channels of these widths `[D]`: the number of its field, of which
    the first is the scale, and its place in that field."""
    sizes = torch.cat([widths.new_tensor([SCALE_BITS]), widths])
    field = torch.arange(len(sizes), device=widths.device).repeat_interleave(sizes)
    starts = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    return field, torch.arange(len(field), device=widths.device) - starts


@dataclass(frozen=True)
class TransformCodec:
    """The codec of a cache whose sides are stored so: what a simulation asks of one."""

    sides: Mapping[tuple[int, str], CodedSide]
    """By layer and side. Others stay exact."""
    token_group: int = 1

    def keep_exact(self, rows: torch.Tensor, layer: int, side: str) -> torch.Tensor:
        """Keys or values `[B, H, T, D]` as the exact windows store them: as they are."""
        return rows

    def fake_quantize(
        self, rows: torch.Tensor, layer: int, side: str, format: object = None
    ) -> torch.Tensor:
        """Rows `[B, H, T, D]` as the cache returns them, in their dtype."""
        if (layer, side) not in self.sides:
            return rows
        return self.sides[layer, side].to(rows.device).read(rows).to(rows.dtype)

    def stored_bits(self, layer: int, side: str, dim: int, format: object = None) -> float:
        """Bits an element of a side, with scales and what fills up a row's last bytes."""
        if (layer, side) not in self.sides:
            return 16.0
        sizes = self.sides[layer, side].row_bytes
        return 8 * sum(sizes) / (len(sizes) * dim)
