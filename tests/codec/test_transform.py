"""Rows whose channels have 0 to 8 bits each."""

import pytest
import torch

from rotationzoo.codec.transform import NO_NUMBER, SCALES, SegmentLayout, arrange
from rotationzoo.linalg.transform_coding import SEGMENT

HEADS, DIM, TOKENS = 3, 48, 16


def random_layout(seed=0):
    """Random widths; the last head stores nothing."""
    generator = torch.Generator().manual_seed(seed)
    widths = torch.randint(0, 9, (HEADS, DIM // SEGMENT), generator=generator)
    widths[-1] = 0
    return SegmentLayout.of(widths.sort(descending=True)[0], TOKENS)


def widths_of(layout):
    return torch.tensor(layout.widths).repeat_interleave(SEGMENT, -1)


def random_channels(layout, tokens=5):
    """In steps: as many as codes reach, and a little more."""
    generator = torch.Generator().manual_seed(1)
    channels = torch.randn(2, HEADS, tokens, DIM, generator=generator)
    return channels * 0.4 * (1 << widths_of(layout))[:, None] * (widths_of(layout) > 0)[:, None]


def random_steps():
    return torch.rand(HEADS, DIM, generator=torch.Generator().manual_seed(2)) + 0.1


@pytest.mark.parametrize(
    ("widths", "starts"),
    [
        # The scale takes one bit of the first byte. Then each byte is full.
        ((7, 6, 5, 4, 4, 3, 2), [1, 10, 19, 28, 24, 16, 8]),
        ((3, 3, 2, 2, 2, 0), [4, 1, 7, 11, 9, 0]),
        # Where none fits, as in the line above, the widest one goes on in the next byte.
        ((5, 5, 5, 1), [2, 7, 12, 1]),
        ((8, 8), [1, 9]),
        ((), []),
    ],
)
def test_segments_fill_bytes(widths, starts):
    assert arrange(widths) == starts


@pytest.mark.parametrize("seed", range(4))
def test_codes_are_packed_without_gaps(seed):
    layout, generator = random_layout(seed), torch.Generator().manual_seed(3)
    widths = widths_of(layout)
    most = (1 << widths)[None, :, None]
    codes = (torch.rand(2, HEADS, 5, DIM, generator=generator) * most).to(torch.uint8)
    codes[0, :, 0] = most[0, :, 0] - 1  # all bits of a row
    numbers = torch.randint(0, 16, (2, HEADS, 5), generator=generator).to(torch.uint8)
    numbers[:, -1] = 0  # of rows that store nothing
    stored = layout.pack(codes, numbers)
    assert [part.shape for part in stored] == [(2, 1, 5, size) for size in layout.row_bytes]
    assert [size % 4 for size in layout.row_bytes] == [0] * HEADS
    assert layout.row_bytes[-1] == 0
    back, of_rows = layout.unpack(stored)
    assert torch.equal(back, codes)
    assert torch.equal(of_rows, numbers)
    # By hand: the numbers that every fourth byte of a row spells.
    starts = arrange(layout.widths[0])
    for token in range(5):
        row = bytes(stored[0][0, 0, token].tolist())
        for byte in range(4):
            spelled = int.from_bytes(row[byte::4], "little")
            assert spelled % 2 == numbers[0, 0, token] >> byte & 1
            for segment, start in enumerate(starts):
                width = layout.widths[0][segment]
                code = spelled >> start & (1 << width) - 1
                assert code == codes[0, 0, token, SEGMENT * segment + byte]
            assert spelled >> 1 + sum(layout.widths[0]) == 0


def test_codes_are_the_nearest_of_the_best_scale():
    layout, steps = random_layout(), random_steps()
    channels, widths = random_channels(layout), widths_of(layout)
    found = layout.levels(*layout.quantize(channels, steps))
    best = torch.full(channels.shape[:3], torch.inf)
    for scale in SCALES:
        read = torch.zeros_like(channels)
        for head in range(HEADS):
            for channel, width in enumerate(widths[head].tolist()):
                levels = (torch.arange(1 << width) + 0.5 - 2**width / 2) * scale
                gaps = (channels[:, head, :, channel, None] - levels).abs()
                read[:, head, :, channel] = levels[gaps.argmin(-1)]
        error = (read - channels) * steps[:, None]
        best = torch.minimum(best, error.square().sum(-1))
    error = (found - channels) * steps[:, None]
    assert torch.allclose(error.square().sum(-1), best, rtol=1e-4)


def test_a_page_holds_the_rows_of_head_after_head():
    layout = random_layout()
    channels, steps = random_channels(layout, tokens=TOKENS), random_steps()
    stored = layout.pack(*layout.quantize(channels, steps))
    page = layout.empty(2)
    for section, rows in zip(layout.view(page), stored, strict=True):
        section[:] = rows
    expected = layout.levels(*layout.quantize(channels, steps))
    assert torch.equal(layout.dequantize(layout.view(page)), expected)
    rows = [each[:, 0].flatten(1) for each in stored]
    assert torch.equal(page, torch.cat(rows, dim=1))


def test_rows_that_are_no_numbers_read_so():
    layout, steps = random_layout(), random_steps()
    channels = random_channels(layout)
    channels[0, 0, 1, 5], channels[1, 1, 0, 3] = torch.inf, 1e19
    codes, numbers = layout.quantize(channels, steps)
    assert (numbers == NO_NUMBER).nonzero().tolist() == [[0, 0, 1], [1, 1, 0]]
    read = layout.levels(codes, numbers)
    assert read[0, 0, 1].isnan().all()
    assert read.isnan().any(-1).sum() == 2
