"""How rows of latents lie in pages: which code each bit of a word belongs to, and in which order
the kernels of `latents.cu` and `many_heads.cu` take them."""

from functools import cache
from itertools import product
from typing import NamedTuple

import torch

from rotationzoo.codec.page_layout import PageLayout
from rotationzoo.codec.slots import cut_codes
from rotationzoo.codec.transform import SegmentLayout
from rotationzoo.linalg.transform_coding import SEGMENT

Layout = PageLayout | SegmentLayout


@cache
def list_pieces(layout: Layout) -> list[tuple[int, int, int, int, int]]:
    """Where the codes of a row lie: the word, the mask of each of its bytes, the channel of the
    first byte, how many channels later that of the next one is, and the power of two that a masked
    byte counts in its code."""
    if isinstance(layout, SegmentLayout):
        return [(*piece[:3], 1, piece[3]) for piece in cut_codes(layout.widths[0])]
    pieces = []
    for word, field in product(range(layout.dim // 16), range(4)):
        mask, power = 3 << 2 * field, -2 * field
        if layout.format.packing == "strided":
            pieces.append((word, mask, field * layout.dim // 4 + 4 * word, 1, power))
        else:
            pieces.append((word, mask, 16 * word + field, 4, power))
    return pieces


def count_pieces(layout: Layout) -> int:
    """Pieces of a row with those of padding, so that the most warps have equally many eights."""
    return max(layout.dim // 4, round_up(len(list_pieces(layout)), layout.dim // 8))


@cache
def piece_table(layout: Layout, device: torch.device) -> torch.Tensor:
    """`Piece` in `latents.cu` for each, int32 `[pieces, 4]`."""
    table, seen = torch.zeros(count_pieces(layout), 4, dtype=torch.int32), set()
    for at, (word, mask, channel, step, power) in enumerate(list_pieces(layout)):
        place = channel | (channel in seen) << 12 | step << 16
        table[at] = torch.tensor([4 * word, mask * 0x10001, place, power])
        seen.add(channel)
    return table.to(device)


@cache
def unpack_table(layout: Layout, device: torch.device) -> torch.Tensor:
    """What `many_heads.cu` unpacks two slots with, int32 `[R / 8, 4]`: the first byte of the words
    of each (bits 0 and 16), the shifts of each (bits 0 and 8), and the masks of both."""
    slots = _list_slots(layout)
    table = []
    for one, other in zip(slots[::2], slots[1::2], strict=True):
        first = second = one.start // 8
        if other.start + other.width > 8 * first + 16:
            second = other.start // 8
        shifts = one.start - 8 * first | other.start - 8 * second << 8
        table.append([4 * first | 4 * second << 16, shifts, one.mask, other.mask])
    return torch.tensor(table).to(device, torch.int32)


class _Slot(NamedTuple):
    """Four codes, one in each byte of one or two words."""

    start: int
    """The first bit in the bytes of all words."""
    width: int
    channel: int
    """Of the first code."""

    @property
    def mask(self) -> int:
        """Of two codes in the halves of a word."""
        return ((1 << self.width) - 1) * 0x10001


@cache
def _list_slots(layout: Layout) -> list[_Slot]:
    """The slots of a row in the order of their bits, those without bits last."""
    found: dict[int, tuple[int, int]] = {}
    for word, mask, channel, _, _ in list_pieces(layout):
        lowest = (mask & -mask).bit_length() - 1
        start, width = found.get(channel, (8 * word + lowest, 0))
        found[channel] = start, width + mask.bit_count()
    slots = sorted(_Slot(*place, channel) for channel, place in found.items())
    if isinstance(layout, SegmentLayout):
        last = slots[-1].start if slots else 0
        empty = [channel for channel in range(0, layout.dim, SEGMENT) if channel not in found]
        slots += [_Slot(last, 0, channel) for channel in empty]
    return slots


@cache
def order_unpacked(layout: Layout, device: torch.device) -> torch.Tensor:
    """The channels of a row `[R]` in the order in which `many_heads.cu` unpacks them."""
    step = 1 if isinstance(layout, SegmentLayout) else list_pieces(layout)[0][3]
    order = [slot.channel + step * byte for slot in _list_slots(layout) for byte in (0, 2, 1, 3)]
    return torch.tensor(order, device=device)


@cache
def middles_of(layout: Layout, device: torch.device) -> torch.Tensor:
    """What a channel has of a row's offset, float32 `[R]`."""
    if isinstance(layout, PageLayout):
        return torch.ones(layout.dim, device=device)
    widths = torch.tensor(layout.widths[0], device=device).repeat_interleave(SEGMENT)
    return 0.5 - 2.0**widths / 2


def row_stride(layout: Layout) -> int:
    """Bytes from one row of codes to the next in shared memory: rows that are read at once lie in
    other banks. Rows that are no multiples of 16 are copied as they lie in a page."""
    size = code_bytes(layout)
    return size + 16 if size % 32 == 0 and size else size


def code_bytes(layout: Layout) -> int:
    """Bytes of a row of codes."""
    return layout.dim // 4 if isinstance(layout, PageLayout) else layout.row_bytes[0]


def round_up(number: int, of: int) -> int:
    """The next multiple of `of`, which is not 0."""
    return max(of, -(-number // of) * of)


def order_bytes(layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """For each number of a turned query: its channel, and what the byte counts in the code. A
    product takes two pairs of numbers of each of four lanes: bytes 0 and 2 of the lane's piece, and
    bytes 1 and 3."""
    pieces = list_pieces(layout)
    count = 4 * count_pieces(layout)
    channels, counts = torch.zeros(count, dtype=torch.int64), torch.zeros(count)
    for number in range(count):
        step, inside = divmod(number, 16)
        piece = 4 * step + inside % 8 // 2
        if piece < len(pieces):
            _, _, channel, apart, power = pieces[piece]
            byte = inside % 2 * 2 + inside // 8
            channels[number], counts[number] = channel + byte * apart, 2.0**power
    return channels, counts
