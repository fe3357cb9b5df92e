"""Rows whose channels have 0 to 8 bits each."""

import pytest
import torch

from rotationzoo.codec.transform import SCALES, CodedSide, TransformCodec, pack, unpack
from rotationzoo.errors import RotationZooError
from rotationzoo.linalg.transform_coding import SCALE_BITS, STEPS

HEADS, DIM = 3, 32


def random_side(seed=0):
    """A side with an orthogonal basis, whose last head stores nothing."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(HEADS, DIM, DIM, generator=generator))[0]
    widths = torch.randint(0, 9, (HEADS, DIM), generator=generator).sort(descending=True)[0]
    widths[-1] = 0
    deviations = torch.rand(HEADS, DIM, generator=generator) + 0.1
    mean = torch.randn(HEADS, DIM, generator=generator)
    steps = torch.tensor(STEPS)[widths] * deviations
    return CodedSide(basis, basis.mT.contiguous(), mean, steps, widths)


def random_rows(seed=1, tokens=5):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, HEADS, tokens, DIM, generator=generator)


def test_codes_are_packed_without_gaps():
    side, generator = random_side(), torch.Generator().manual_seed(3)
    most = (1 << side.widths)[None, :, None]
    codes = (torch.rand(2, HEADS, 5, DIM, generator=generator) * most).to(torch.uint8)
    scale = torch.randint(0, 8, (2, HEADS, 5), generator=generator).to(torch.uint8)
    scale[:, -1] = 0  # of a row that stores nothing
    data = pack(codes, scale, side)
    assert data.shape == (2, 5, sum(side.row_bytes))
    back, scales = unpack(data, side)
    assert torch.equal(back, codes)
    assert torch.equal(scales, scale)
    # By hand: the number that the bytes of the first row spell.
    spelled = int.from_bytes(bytes(data[0, 0, : side.row_bytes[0]].tolist()), "little")
    assert spelled % 8 == scale[0, 0, 0]
    spelled >>= SCALE_BITS
    for code, width in zip(codes[0, 0, 0].tolist(), side.widths[0].tolist(), strict=True):
        assert spelled % (1 << width) == code
        spelled >>= width


def test_bytes_hold_what_is_read():
    side, rows = random_side(), random_rows()
    assert torch.equal(side.decode(side.encode(rows)), side.read(rows))


def test_codes_are_the_nearest_of_the_best_scale():
    side, rows = random_side(), random_rows()
    channels = (rows - side.mean[:, None]) @ side.forward
    found = (side.read(rows) - side.mean[:, None]) @ side.forward
    best = torch.full(rows.shape[:3], torch.inf)
    for scale in SCALES:
        read = torch.zeros_like(channels)
        for head in range(HEADS):
            for channel, width in enumerate(side.widths[head].tolist()):
                if width:
                    levels = torch.arange(1 << width) + 0.5 - 2 ** (width - 1)
                    levels = levels * side.steps[head, channel] * scale
                    gaps = (channels[:, head, :, channel, None] - levels).abs()
                    read[:, head, :, channel] = levels[gaps.argmin(-1)]
        best = torch.minimum(best, (read - channels).square().sum(-1))
    assert torch.allclose((found - channels).square().sum(-1), best, rtol=1e-4)


def test_a_channel_without_bits_reads_its_mean():
    side = random_side()
    read = side.read(random_rows())[:, -1]
    assert torch.allclose(read, side.mean[-1].expand_as(read), atol=1e-6)


def test_a_codec_counts_its_bytes_and_leaves_other_sides_exact():
    side, rows = random_side(), random_rows().bfloat16()
    codec = TransformCodec({(0, "key"): side})
    assert torch.equal(codec.fake_quantize(rows, 0, "key"), side.read(rows).bfloat16())
    assert codec.fake_quantize(rows, 0, "value") is rows
    assert codec.stored_bits(0, "value", DIM) == 16
    stored = side.encode(rows)
    assert codec.stored_bits(0, "key", DIM) == 8 * stored.shape[-1] / (HEADS * DIM)


def test_rows_that_are_not_finite_are_refused():
    rows = random_rows()
    rows[0, 0, 0, 0] = torch.nan
    with pytest.raises(RotationZooError, match="not finite"):
        random_side().encode(rows)
