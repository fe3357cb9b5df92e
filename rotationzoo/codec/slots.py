"""How a kernel reads rows of `transform.SegmentLayout`: which code each bit of a word belongs to.

A piece is the part of a segment's codes in the bytes of one word; a code in two words is two
pieces. A slot is a word with at most one piece that ends in the lower half of its bytes, and at
most one other. A piece is a number: its first channel, plus 2^9 times 8 more than the power of two
by which the masked byte counts in the code, plus 2^16 times the mask of a byte.
"""

from functools import cache
from itertools import zip_longest

import torch

from rotationzoo.codec.transform import SegmentLayout, arrange
from rotationzoo.linalg.transform_coding import SEGMENT

TOGETHER = 8
"""Slots that a warp reads together."""
Slot = tuple[int, int, int]
"""The byte of the word, and both pieces, 0 where there is none."""


@cache
def list_slots(layout: SegmentLayout) -> list[list[Slot]]:
    """The slots of each head."""
    return [_slots_of(widths) for widths in layout.widths]


def _slots_of(widths: tuple[int, ...]) -> list[Slot]:
    words: dict[int, tuple[list[int], list[int]]] = {}
    for segment, first in enumerate(arrange(widths)):
        start, end = first, first + widths[segment]
        while start < end:
            stop = min(end, start // 8 * 8 + 8)
            low, high = start % 8, (stop - 1) % 8 + 1
            mask, power = (1 << high) - (1 << low), start - first - low
            halves = words.setdefault(start // 8, ([], []))
            halves[high > 4].append(SEGMENT * segment | power + 8 << 9 | mask << 16)
            start = stop
    slots = []
    for word, halves in sorted(words.items()):
        slots += [(4 * word, *pieces) for pieces in zip_longest(*halves, fillvalue=0)]
    return slots


@cache
def count_slots(layout: SegmentLayout) -> int:
    """Slots of each head in the table."""
    most = max(map(len, list_slots(layout)))
    return max(1, -(-most // TOGETHER)) * TOGETHER


@cache
def slot_table(layout: SegmentLayout, device: torch.device) -> torch.Tensor:
    """`HeadTable` of the source for each head, int32 `[H, 4 + 4 * slots]`: the bytes of a row, the
    first byte in a page, the number of slots, and 0; then each slot and 0."""
    rows, count = [], count_slots(layout)
    for head, slots in enumerate(list_slots(layout)):
        numbers = [layout.row_bytes[head], layout.starts[head], len(slots), 0]
        for slot in slots:
            numbers += [*slot, 0]
        rows.append([*numbers, *[0] * 4 * (count - len(slots))])
    return torch.tensor(rows).to(torch.int32).to(device)
