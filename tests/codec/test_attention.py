"""Attention over packed pages, as `codec.attention` defines it, against torch's own over the rows
that the pages hold."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from rotationzoo.codec import int2
from rotationzoo.codec.attention import ExactWindow, PackedSide, PackedTokens, Scores, attend
from rotationzoo.codec.formats import FINE, FORMATS
from rotationzoo.codec.pages import PageLayout

HEADS, TOKENS, HEAD, TAIL = 2, 32, 5, 9
KEY_DIM, VALUE_DIM = 16, 12
LENGTHS = [70, 33]


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def packed_side(dim, format):
    """A side in three pages a row, and what its rows are, computed without pages."""
    layout = PageLayout(HEADS, dim, 2, TOKENS, format)
    rows = draw(2, HEADS, 3 * TOKENS, dim, seed=dim)
    blocks, restored = [], []
    for part in rows.split(TOKENS, dim=2):
        stored = int2.quantize(part, 1.0, dim // 2, format)
        block = layout.empty(2)
        sections = layout.view(block)
        packed = replace(stored, codes=int2.pack(stored.codes, format))
        for section, part in zip(sections, layout.split(packed), strict=True):
            section[:] = part
        blocks.append(block)
        # Everything in float32, by the formulas of the formats.
        scale, offset = stored.scale.float(), stored.offset.float()
        scale, offset = (each.repeat_interleave(dim // 2, 3) for each in (scale, offset))
        codes = stored.codes.float()
        zero = format.offset == "zero"
        restored.append((codes - offset) * scale if zero else codes * scale + offset)
    matrix = draw(HEADS, dim, dim, seed=1) / 4
    return PackedSide(blocks, layout, matrix), torch.cat(restored, dim=2) @ matrix


def windows():
    return [
        ExactWindow(draw(2, HEADS, size, KEY_DIM, seed=size), draw(2, HEADS, size, VALUE_DIM))
        for size in (HEAD, TAIL)
    ]


def packed(format=int2.SGLANG):
    key, keys = packed_side(KEY_DIM, format)
    value, values = packed_side(VALUE_DIM, format)
    return PackedTokens(key, value, torch.tensor(LENGTHS, dtype=torch.int32)), keys, values


def reference(query, keys, values, exact, scale):
    """The query of each row by itself, over the rows that it reads."""
    outputs = []
    head, tail = exact
    for row, length in enumerate(LENGTHS):
        counts = HEAD, length, TAIL
        key = [part[row, :, :n] for part, n in zip((head.key, keys, tail.key), counts, strict=True)]
        value = [
            part[row, :, :n]
            for part, n in zip((head.value, values, tail.value), counts, strict=True)
        ]
        outputs.append(
            scaled_dot_product_attention(
                query[row : row + 1],
                torch.cat(key, 1)[None],
                torch.cat(value, 1)[None],
                scale=scale,
                enable_gqa=True,
            )
        )
    return torch.cat(outputs)


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("format", FORMATS)
def test_it_is_torch_s_attention_over_the_restored_rows(format, group):
    tokens, keys, values = packed(FORMATS[format])
    query, exact = draw(2, HEADS * group, 1, KEY_DIM), windows()
    output = attend(query, tokens, *exact, Scores(0.3))
    assert output.shape == (2, HEADS * group, 1, VALUE_DIM)
    # Measured: at most 3.6e-7.
    expected = reference(query, keys, values, exact, 0.3)
    torch.testing.assert_close(output, expected, rtol=0, atol=3e-6)


def test_the_type_is_that_of_the_query():
    tokens, *_ = packed()
    query, exact = draw(2, 4, 1, KEY_DIM), windows()
    output = attend(query.bfloat16(), tokens, *exact, Scores(0.3))
    assert output.dtype == torch.bfloat16
    full = attend(query.bfloat16().float(), tokens, *exact, Scores(0.3))
    assert torch.equal(output, full.bfloat16())


def test_a_page_is_where_its_layout_says():
    """Read with nothing but an address, as a kernel does."""
    layout = PageLayout(3, KEY_DIM, 2, 8, FORMATS["vllm"])
    codes, numbers = 3 * 8 * KEY_DIM // 4, 3 * 8 * 2
    aligned = -(-2 * numbers // 16) * 16
    assert layout.starts == [0, codes, codes, codes + aligned, codes + 2 * aligned]
    assert layout.bytes == layout.starts[-1]
    block = layout.empty(2)
    sections = layout.view(block)
    sections.codes[:] = torch.arange(codes).reshape(3, 8, -1) % 251
    sections.scale[:] = torch.arange(float(numbers)).reshape(3, 8, -1)
    sections.offset[:] = -sections.scale
    side = PackedSide([block, block], layout, torch.eye(KEY_DIM).expand(3, -1, -1))
    start = block.data_ptr()
    addresses = [[start, start], [start + layout.bytes, start + layout.bytes]]
    assert side.addresses().tolist() == addresses
    page = block[1].numpy().tobytes()
    assert list(page[:codes]) == [number % 251 for number in range(codes)]
    half = torch.frombuffer(bytearray(page), dtype=torch.float16)
    assert half[codes // 2 :][:numbers].tolist() == list(range(numbers))
    assert half[(codes + aligned) // 2 :][:numbers].tolist() == [-n for n in range(numbers)]


def test_third_bits_have_a_section_of_their_own():
    layout = PageLayout(3, 64, 1, 8, FINE)
    codes, thirds = 3 * 8 * 16, 3 * 8 * 6
    scales = 3 * 8 * 2
    assert layout.starts == [0, codes, codes + thirds, *[codes + thirds + scales] * 2]
    stored = int2.quantize(draw(2, 3, 8, 64), format=FINE)
    packed = replace(stored, codes=int2.pack(stored.codes, FINE))
    block = layout.empty(2)
    for section, part in zip(layout.view(block), layout.split(packed), strict=True):
        section[:] = part
    assert torch.equal(block[1, :16], packed.codes[1, 0, 0, :16])
    assert torch.equal(block[1, codes : codes + 6], packed.codes[1, 0, 0, 16:])
    assert torch.equal(layout.dequantize(layout.view(block)), int2.dequantize(stored, FINE))
