"""Pages of packed rows: where each part of a row is, and that the rows come back."""

from dataclasses import replace

import pytest
import torch

from rotationzoo.codec import int2
from rotationzoo.codec.attention import PackedSide
from rotationzoo.codec.formats import FINE, FORMATS
from rotationzoo.codec.pages import PageLayout


def test_a_page_is_where_its_layout_says():
    """Read with nothing but an address, as a kernel does."""
    dim = 16
    layout = PageLayout(3, dim, 2, 8, FORMATS["vllm"])
    codes, numbers = 3 * 8 * dim // 4, 3 * 8 * 2
    aligned = -(-2 * numbers // 16) * 16
    assert layout.starts == [0, codes, codes, codes + aligned, codes + 2 * aligned]
    assert layout.bytes == layout.starts[-1]
    block = layout.empty(2)
    sections = layout.view(block)
    sections.codes[:] = torch.arange(codes).reshape(3, 8, -1) % 251
    sections.scale[:] = torch.arange(float(numbers)).reshape(3, 8, -1)
    sections.offset[:] = -sections.scale
    side = PackedSide([block, block], layout, torch.eye(dim).expand(3, -1, -1))
    start = block.data_ptr()
    addresses = [[start, start], [start + layout.bytes, start + layout.bytes]]
    assert side.addresses().tolist() == addresses
    page = block[1].numpy().tobytes()
    assert list(page[:codes]) == [number % 251 for number in range(codes)]
    half = torch.frombuffer(bytearray(page), dtype=torch.float16)
    assert half[codes // 2 :][:numbers].tolist() == list(range(numbers))
    assert half[(codes + aligned) // 2 :][:numbers].tolist() == [-n for n in range(numbers)]


@pytest.mark.parametrize("format", [*FORMATS.values(), FINE], ids=[*FORMATS, "fine"])
def test_rows_of_every_format_come_back_from_pages(format):
    layout = PageLayout(3, 64, 2, 8, format)
    rows = torch.randn(2, 3, 8, 64, generator=torch.Generator().manual_seed(0))
    stored = int2.quantize(rows, 1.0, 32, format)
    packed = replace(stored, codes=int2.pack(stored.codes, format))
    block = layout.empty(2)
    for section, part in zip(layout.view(block), layout.split(packed), strict=True):
        section[:] = part
    assert torch.equal(layout.dequantize(layout.view(block)), int2.dequantize(stored, format))
    codes = packed.codes[1, 0, 0]
    assert torch.equal(block[1, :16], codes[:16])
    third_bits = 3 * 8 * 16
    assert layout.starts[1] == third_bits
    assert torch.equal(block[1, third_bits:][: len(codes) - 16], codes[16:])
