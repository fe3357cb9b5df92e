"""How a kernel reads rows of `transform.SegmentLayout`: what each bit of each word belongs to.

Each byte of a row has pieces of codes, one after another: a code that lies in two bytes is two
pieces. A slot is a word with two masks. Each mask takes at most one piece of each byte: the first
one of those that end in the lower half of their byte, the second one of the others. A piece is a
number: its channel, plus 2^9 times 8 more than the power of two that the masked byte counts in the
code, plus 2^16 times its mask.
"""

from functools import cache
from itertools import chain, zip_longest

import torch

from rotationzoo.codec.transform import SCALE_BITS, SegmentLayout
from rotationzoo.linalg.transform_coding import SEGMENT, WORD

_NUMBERS = 11  # of a slot
_TOGETHER = 8  # slots that a warp reads together


@cache
def list_slots(layout: SegmentLayout) -> list[list[list[int]]]:
    """The slots of each head: the byte of the word, both masks, and the pieces of the four bytes of
    each, 0 where there is none."""
    return [_slots_of(widths) for widths in layout.widths]


def _slots_of(widths: tuple[int, ...]) -> list[list[int]]:
    words: dict[int, list[list[int]]] = {}
    end = SCALE_BITS
    for channel in range(SEGMENT * len(widths)):
        first = start = end
        end += widths[channel // SEGMENT]
        while start < end:
            stop = min(end, start // 8 * 8 + 8)
            low, high = start % 8, (stop - 1) % 8 + 1
            mask, power = (1 << high) - (1 << low), start - first - low
            pieces = words.setdefault(start // WORD, [[] for _ in range(8)])
            pieces[4 * (high > 4) + start // 8 % 4].append(channel | power + 8 << 9 | mask << 16)
            start = stop
    slots = []
    for word, pieces in words.items():
        for eight in zip_longest(*pieces, fillvalue=0):
            masks = bytes(piece >> 16 for piece in eight)
            lower, upper = (int.from_bytes(half, "little") for half in (masks[:4], masks[4:]))
            slots.append([word * WORD // 8, lower, upper, *eight])
    return slots


@cache
def count_slots(layout: SegmentLayout) -> int:
    """How many slots each head has in the table."""
    most = max(map(len, list_slots(layout)))
    return max(1, -(-most // _TOGETHER)) * _TOGETHER


@cache
def slot_table(layout: SegmentLayout, device: torch.device) -> torch.Tensor:
    """`HeadTable` of the source for each head, int32 `[H, 3 + 11 slots]`: bytes of a row, the first
    byte of a page, how many slots there are, and these."""
    rows, size = [], 3 + _NUMBERS * count_slots(layout)
    for head, slots in enumerate(list_slots(layout)):
        numbers = layout.row_bytes[head], layout.starts[head], len(slots), *chain(*slots)
        rows.append([*numbers, *[0] * (size - len(numbers))])
    return torch.tensor(rows).to(torch.int32).to(device)
