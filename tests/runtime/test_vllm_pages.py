"""Pages of a server against a layer of the cache for transformers, which reads the same rows."""

from dataclasses import replace

import pytest
import torch
from support.float64 import to_float64

from rotationzoo.calibration.fit import fit
from rotationzoo.codec.formats import FORMATS
from rotationzoo.model.geometry import Layer
from rotationzoo.recipe import PRESETS
from rotationzoo.rotations import SIDES
from rotationzoo.runtime.layer import RotatedLayer
from rotationzoo.runtime.padding import Padding
from rotationzoo.runtime.settings import CacheSettings
from rotationzoo.runtime.vllm.pages import NewTokens, Pages
from rotationzoo.runtime.vllm.settings import cell_bytes
from rotationzoo.simulation.arm import Arm
from rotationzoo.simulation.layout import CacheLayout

HEADS, DIM, TOKENS = 2, 16, 8
GEOMETRY = [Layer(0, 0, 4, HEADS, DIM, DIM)]
# A prompt in chunks, tokens, and a prompt that goes on.
CALLS = [11, 9, 1, 1, 1, 1, 1, 14, 1, 1]
CLOSE = 1e-5  # of rows around 1; 5e-7 was measured


def settings_of(format="vllm", rounding="nearest", sink=3, recent=6) -> CacheSettings:
    generator = torch.Generator().manual_seed(5)

    def complete(_, side, rotation):
        mean = torch.randn(HEADS, DIM, generator=generator)
        above = torch.randn(HEADS, DIM, DIM, generator=generator).triu(1) / 4
        return replace(rotation, mean=mean, feedback=above + torch.eye(DIM))

    rotations = to_float64(fit(None, PRESETS["random"], GEOMETRY)).replace(complete)
    layout = CacheLayout(FORMATS[format], sink, recent, prefill_layout="window")
    return CacheSettings(Arm("", rotations, rounding=rounding), layout, block=8)


def new_cache(settings: CacheSettings, pages: int = 24) -> torch.Tensor:
    """A tensor as vLLM allocates it."""
    return torch.zeros(pages, HEADS, TOKENS, cell_bytes(settings, DIM) // 2, dtype=torch.bfloat16)


def draw(tokens: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {side: torch.randn(tokens, HEADS, DIM, generator=generator) for side in SIDES}


def feed(pages: Pages, cache, rows, table, calls=CALLS, start=0):
    """Hand rows over call by call; what each call reads."""
    reads, end = [], start
    for count in calls:
        part = {side: each[end : end + count] for side, each in rows.items()}
        end += count
        new = NewTokens(part, table[: -(-end // TOKENS)], end)
        pages.write(cache, new)
        reads.append(pages.read(cache, new))
    return reads


def table_of(seed: int, count: int = 6) -> torch.Tensor:
    """Pages in no order."""
    return torch.randperm(24, generator=torch.Generator().manual_seed(seed))[:count]


@pytest.mark.parametrize("rounding", ["nearest", "feedback"])
@pytest.mark.parametrize("format", ["sglang", "vllm"])
def test_every_call_reads_what_the_cache_of_transformers_reads(format, rounding):
    settings, rows = settings_of(format, rounding), draw(sum(CALLS))
    read = feed(Pages(settings, 0, 4), new_cache(settings), rows, table_of(1))
    layer = RotatedLayer(settings, 0, Padding())
    parts = zip(*(rows[side].transpose(0, 1)[None].split(CALLS, 2) for side in SIDES), strict=True)
    for here, there in zip(read, (layer.update(*part) for part in parts), strict=True):
        for side, expected in zip(SIDES, there, strict=True):
            assert (here[side] - expected[0]).abs().max() < CLOSE
    exact = rows["value"].transpose(0, 1)
    assert (read[-1]["value"] - exact).abs().max() > 0.1, "some are read from codes"


def test_requests_in_turns_read_what_each_alone_reads():
    settings = settings_of()
    order = torch.randperm(24, generator=torch.Generator().manual_seed(3)).split(6)
    requests = [(draw(sum(CALLS), seed), order[seed]) for seed in range(3)]
    alone = [
        feed(Pages(settings, 0, 1), new_cache(settings), rows, table) for rows, table in requests
    ]
    pages, cache, ends = Pages(settings, 0, 3), new_cache(settings), [0, 0, 0]
    for number, count in enumerate(CALLS):
        for request, (rows, table) in enumerate(requests):
            (read,) = feed(pages, cache, rows, table, [count], ends[request])
            ends[request] += count
            for side in SIDES:
                assert torch.equal(read[side], alone[request][number][side])


def test_a_prefix_is_read_by_another_request_and_a_page_forgets_its_former_tokens():
    settings, rows, table = settings_of(), draw(40), table_of(4)
    pages, cache = Pages(settings, 0, 2), new_cache(settings)
    feed(pages, cache, rows, table, [16, 8])
    other = draw(40, seed=7)
    shared = {side: torch.cat([rows[side][:16], other[side][16:]]) for side in SIDES}
    pages_of_other = torch.cat([table[:2], torch.tensor([p for p in range(24) if p not in table])])
    (read,) = feed(pages, cache, shared, pages_of_other, [8], start=16)
    layer = RotatedLayer(settings, 0, Padding())
    parts = [shared[side].transpose(0, 1)[None] for side in SIDES]
    layer.update(*(part[:, :, :16] for part in parts))
    expected = layer.update(*(part[:, :, 16:24] for part in parts))
    for side, there in zip(SIDES, expected, strict=True):
        assert (read[side] - there[0]).abs().max() < CLOSE, "the copies are still there"
    # The third page of the first request now belongs to a third one.
    feed(pages, cache, other, table[2:3], [8])
    held = pages.copies[int(table[2])]
    assert torch.equal(held.rows["key"][held.held], other["key"][:8][held.held])


def test_as_many_copies_are_kept_as_the_windows_of_running_requests_take():
    settings = settings_of()
    pages, cache = Pages(settings, 0, most_requests=1), new_cache(settings)
    for seed in range(4):
        feed(pages, cache, draw(40, seed), torch.arange(5) + 5 * (seed % 4), [40])
    windows = 1 + 1 + 1  # a page of the sink, and 6 recent tokens on two pages
    assert len(pages.copies) == windows
    # Without their copies, the tokens of the first request are read from codes.
    rows = draw(40, 0)
    last = {side: each[39:] for side, each in rows.items()}
    read = pages.read(cache, NewTokens(last, torch.arange(5), 40))
    exact = rows["value"][:3].transpose(0, 1)
    assert (read["value"][:, :3] - exact).abs().max() > 0.1


def test_a_cell_takes_what_the_format_says():
    assert cell_bytes(settings_of("vllm"), DIM) == 2 * (4 + 4)
    assert cell_bytes(settings_of("sglang"), DIM) == 2 * (4 + 8)
