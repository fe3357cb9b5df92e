"""How rows of latents lie in pages: which code each bit of a word belongs to, and in which order
the kernels of `latents.cu` and `many_heads.cu` take them."""

from functools import cache
from itertools import product

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
    """What takes four codes of a row each, int32 `[R / 4, 4]`: two words (bits 0 and 16), how far
    the first is shifted, and the masks of both."""
    slots = {channel: [0, 0, 0, 0] for channel in _first_channels(layout)}
    for word, mask, channel, _, power in list_pieces(layout):
        slot = slots[channel]
        if power <= 0:  # the lowest bits of the codes
            slot[:3] = word | word << 16, -power, (mask >> -power) * 0x01010101
        else:
            slot[0] = slot[0] & 0xFFFF | word << 16
            slot[3] = (mask << power) * 0x01010101
    return torch.tensor([*slots.values()]).to(device, torch.int32)


def _first_channels(layout: Layout) -> list[int]:
    """The first channel of each four codes that are unpacked together."""
    if isinstance(layout, SegmentLayout):
        return [*range(0, layout.dim, SEGMENT)]
    return sorted({channel for _, _, channel, _, _ in list_pieces(layout)})


@cache
def order_unpacked(layout: Layout, device: torch.device) -> torch.Tensor:
    """The channels of a row `[R]` in the order in which `many_heads.cu` unpacks them."""
    step = 1 if isinstance(layout, SegmentLayout) else list_pieces(layout)[0][3]
    order = [first + step * byte for first in _first_channels(layout) for byte in (0, 2, 1, 3)]
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
