"""Pages of a server against a layer of the cache for transformers, which reads the same rows."""

import copy
from dataclasses import asdict, replace

import benchmark_pages
import pytest
import torch
from support.codec import ON_GPU, on_cpu, on_gpu
from support.server_pages import (
    DIM,
    GEOMETRY,
    HEADS,
    SCORES,
    TOKENS,
    WIDTH,
    Server,
    draw,
    part_of,
    query_of,
    settings_of,
)

from rotationzoo.cache.layer import Padding, RotatedLayer
from rotationzoo.codec.attention import attend_rows
from rotationzoo.codec.formats import SEGMENTS
from rotationzoo.codec.settings import CacheSettings
from rotationzoo.codec.transform import SegmentLayout
from rotationzoo.codec.windows import CacheLayout
from rotationzoo.errors import RotationZooError, UnsupportedModel
from rotationzoo.rotations import SIDES
from rotationzoo.vllm import segments, steps
from rotationzoo.vllm.pages import LayerPages, split_blocks
from rotationzoo.vllm.prompts import LayerReader
from rotationzoo.vllm.settings import cell_bytes, select_heads

pytestmark = pytest.mark.usefixtures("stream_order")
# A prompt in chunks, tokens, and a prompt that goes on.
CALLS = [11, 9, 1, 1, 1, 1, 1, 14, 1, 1]
CLOSE = 1e-5  # of rows around 1; 5e-7 was measured


def calls_of(rows, calls=CALLS, start=0):
    """The rows of each call."""
    for count in calls:
        yield part_of(rows, start, start + count)
        start += count


def read_in_transformers(settings: CacheSettings, rows, calls=CALLS) -> list[torch.Tensor]:
    """What the queries of each call read from a layer of the cache for transformers."""
    layer, outputs = RotatedLayer(settings, 0, Padding()), []
    for new in calls_of(rows, calls):
        key, value = layer.update(*(new[side].transpose(0, 1)[None] for side in SIDES))
        outputs.append(attend_causally(query_of(new["key"]), key, value))
    return outputs


def attend_causally(query, key, value) -> torch.Tensor:
    """What the last tokens' queries `[T, H_q, D]` read of rows `[1, H, L, D]`."""
    position = torch.arange(key.shape[2])
    reads = position <= position[key.shape[2] - len(query) :, None]
    read, _ = attend_rows(query.transpose(0, 1)[None], key, value, reads[None], SCORES)
    return read[0].transpose(0, 1)


STORED = "sglang", "vllm", "segments"


@pytest.mark.parametrize(
    ("format", "segment"), [*((each, segments.SHORT) for each in STORED), ("vllm", 5)]
)
def test_requests_in_one_step_read_what_the_cache_of_transformers_reads(format, segment):
    """Chunks and single tokens of three requests, in steps that do not line up, and segments that
    end within a request. A prompt of the second request goes on inside the sink, and one of the
    third inside the window behind it."""
    settings = settings_of(format)
    server = Server(settings, segment=segment)
    counts = {0: CALLS, 1: [1, 1, 9, 1, 1, 14, 1, 9, 1, 1], 2: [1] * 7 + [9, 12, 1]}
    rows = {request: draw(sum(each), seed=request) for request, each in counts.items()}
    alone, calls = {}, {}
    for request, each in rows.items():
        alone[request] = read_in_transformers(settings, each, counts[request])
        calls[request] = list(calls_of(each, counts[request]))
        server.begin(request)
    for step in range(len(CALLS) + 2):
        # Each request is a step behind the one before it.
        now = {r: each[step - r] for r, each in calls.items() if 0 <= step - r < len(CALLS)}
        for request, output in server.run(now).items():
            assert (output - alone[request][step - request]).abs().max() < CLOSE
    exact = replace(settings, layout=replace(settings.layout, recent=100))
    all_exact = read_in_transformers(exact, rows[0])[-1]
    assert (alone[0][-1] - all_exact).abs().max() > 0.1, "some are read from codes"


@pytest.mark.parametrize(
    ("format", "sink", "recent", "verified", "times"),
    [("vllm", 3, 6, 4, 2), ("segments", 12, 4, 4, 2), ("vllm", 3, 20, 12, 1)],
)
def test_few_tokens_in_one_step_read_what_each_reads_in_a_step_of_its_own(
    format, sink, recent, verified, times
):
    """From the first token on, inside the sink, and at the end of a page. Every step comes twice,
    first with drafts that are taken back. Requests and drafts are as many as a server has slots
    for, even more than count as few without drafts."""
    settings = settings_of(format, sink=sink, recent=recent)
    done = {0: 0, 1: 9, 2: 14, 3: 5, 4: 12, 5: 21}
    server = Server(settings, len(done), pages=80, verified=verified)
    rows = {request: draw(70, seed=request) for request in done}
    expected = {}
    for request, prompt in done.items():
        calls = [prompt][: prompt > 0] + [1] * (70 - prompt)
        expected[request] = torch.cat(read_in_transformers(settings, rows[request], calls))
        server.begin(request)
        if prompt:
            server.run({request: part_of(rows[request], 0, prompt)})
    several = [(4, 4, 4), (1, 3, 2), (2, 2, 2), (4, 1, 1), (3, 4, 2), (1, 1, 1), (4, 4, 4)]
    for counts in several * times:
        counts = [count * verified // 4 for count in counts * 2]
        for is_draft in (True, False):
            new = {}
            for request, count in enumerate(counts):
                start = done[request]
                server.lengths[request] = start
                own = part_of(rows[request], start, start + count)
                new[request] = draw(count, seed=start) if is_draft else own
            read = server.run(new)
        for request, count in enumerate(counts):
            own = expected[request][done[request] :][:count]
            assert (read[request] - own).abs().max() < CLOSE
            done[request] += count


def test_a_prefix_is_read_by_another_request_with_its_copies():
    server, rows, other = Server(settings_of()), draw(24), draw(9, seed=7)
    server.begin("first")
    server.run({"first": rows})
    server.begin("second", prefix_of="first", pages=3)
    both = {side: torch.cat([rows[side], other[side]]) for side in SIDES}
    expected = read_in_transformers(settings_of(), both, [24, 9])[1]
    assert (server.run({"second": other})["second"] - expected).abs().max() < CLOSE


def test_a_page_forgets_its_former_tokens():
    server = Server(settings_of())
    for request in range(12):  # as many pages as there are, several times
        server.begin(request)
        rows = draw(sum(CALLS), seed=request)
        read = [server.run({request: new})[request] for new in calls_of(rows)]
        for here, there in zip(read, read_in_transformers(settings_of(), rows), strict=True):
            assert (here - there).abs().max() < CLOSE
        server.end(request)


def test_pages_that_others_write_are_read_from_codes():
    server = Server(settings_of())
    server.begin("loaded")
    server.run({"loaded": draw(20)})
    server.planner.forget(server.planner.slot_of.nonzero()[:, 0])
    for new in range(1, 4):  # which are in a page of those tokens
        step = server.plan({"loaded": 1})
        assert step.decode.starts.tolist() == [0], "the sink, too"
        assert step.decode.ends.tolist() == [20], f"only {new} are exact"


def test_copies_that_were_read_least_recently_go_first_and_their_tokens_are_read_from_codes():
    """With the slots of one request: 1 page of the sink, and 2 of 6 recent tokens in pages of 8."""
    server = Server(settings_of(), most_requests=1, pages=80)
    server.begin("first")
    server.run({"first": draw(42)})
    slots = server.planner.slots - 1
    used, *lacking = server.planner.count().tolist()
    assert 0 < used <= slots
    assert lacking == [0, 0, 0]
    server.run({"first": draw(1)})
    assert server.planner.count().tolist()[1:] == [0, 0, 0]
    for request in range(3):
        server.begin(request)
        server.run({request: draw(40, seed=request + 1)})
    used, forgotten, *_ = server.planner.count().tolist()
    assert used == slots
    assert forgotten >= 3, "those of the first request, which would still read them"
    for _ in range(2):  # in the middle of a page
        step = server.plan({"first": 1})
        assert step.decode.starts.tolist() == [0], "the sink, too"
        assert step.decode.ends.tolist() == [43], "the new tokens alone are exact"
    assert int((server.planner.slot_of > 0).sum()) <= slots
    fresh = server.plan({2: 1})
    assert fresh.decode.starts.tolist() == [3]
    assert fresh.decode.ends.tolist() == [41 - 6]
    server.run({"first": draw(1), 2: draw(1)})
    assert server.planner.count().tolist()[2:] == [1, 1]


@pytest.mark.parametrize("padding", [0, 160])
def test_pages_of_a_block_share_its_padding_or_are_refused(padding):
    heads, tokens, cell = 2, 128, 40
    room = heads * tokens * cell + padding
    memory = torch.arange(3 * room)
    blocks = memory.as_strided((3, heads, tokens, cell), (room, tokens * cell, cell, 1))
    pages = split_blocks(blocks, heads)
    assert pages.shape == (6, heads, 64, cell)
    assert pages[:, 0, 0, 0].tolist() == [page * room // 2 for page in range(6)]
    assert all(page.is_contiguous() for page in pages)
    assert pages[-1, -1, -1, -1] < len(memory)
    blocks = torch.zeros(2, 1000).as_strided((2, 1, 192, 1), (1000, 192, 1, 1))
    with pytest.raises(UnsupportedModel, match="blocks of 4,000 bytes to 3 pages"):
        split_blocks(blocks, 1)


def test_a_prompt_leaves_the_buffers_of_captured_steps_where_they_are():
    server = Server(settings_of(), most_requests=2)
    server.begin("first")
    server.run({"first": draw(5)})
    before = server.plan({"first": 1})
    server.begin("second")
    server.run({"second": draw(30)})
    server.run({"first": draw(4), "second": draw(3)})
    after = server.plan({"first": 1})
    for name in ("pages", "page_offsets", "slots"):
        assert getattr(after, name).data_ptr() == getattr(before, name).data_ptr()
    for name in ("page_table", "starts", "ends"):
        places = [getattr(step.decode, name).data_ptr() for step in (before, after)]
        assert places[0] == places[1]
    assert after.decode.recent.slots.data_ptr() == before.decode.recent.slots.data_ptr()


def test_padding_writes_to_nobodys_page():
    server = Server(settings_of())
    server.begin(0)
    server.run({0: draw(9)})
    before = server.layer.memory["key"][1:].clone()
    step = server.plan_padding(2)
    server.layer.copy(step, draw(2))
    server.layer.store(step, draw(2))
    assert torch.equal(server.layer.memory["key"][1:], before)
    assert step.slots.tolist() == [0, 0]


@pytest.mark.parametrize("format", ["vllm", "segments"])
def test_a_process_holds_its_heads(format):
    whole = settings_of(format)
    part = select_heads(whole, slice(1, 2))
    rotations = [each.codec.rotations[0].key for each in (whole, part)]
    assert torch.equal(rotations[1].matrix, rotations[0].matrix[1:])
    if format == "vllm":
        assert torch.equal(rotations[1].mean, rotations[0].mean[1:])
        assert len(rotations[1].clip) == 1
        return
    for side in SIDES:
        both, second = (each.codec.segments(0, side, TOKENS).row_bytes for each in (whole, part))
        assert both[1:] == second
        for way in ("forward", "inverse", "steps"):
            both, second = (getattr(each.codec, way)(0, side) for each in (whole, part))
            assert (both[1:] - second).abs().max() < 1e-12


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=on_cpu), *ON_GPU])
def test_the_kernel_plans_what_torch_plans(device, monkeypatch, request):
    """Requests that begin, grow and end, with more pages in windows than there are slots."""
    if device == "cpu":
        request.getfixturevalue("programs_on_cpu")
    settings = settings_of(kernel=True)
    plans = {}
    for way in ("kernel", "torch"):
        monkeypatch.setattr(steps, "kernels_run_on", lambda device, way=way: way == "kernel")
        server, plans[way] = Server(settings, 3, 160, device=device, segment=16), []
        for newest in range(6):
            server.begin(newest)
            plans[way].append(describe(server, server.plan({newest: 5 * newest + 1})))
            for number in range(9):
                # One waits meanwhile, and others take its copies.
                busy = [each for each in server.tables if each != number % 3 or not newest]
                counts = {each: 1 + (number + each) % 4 * (number > 4) for each in busy}
                if number % 4 == 3:  # the last ones read and write a chunk
                    counts |= dict.fromkeys(busy[-2:], 11 + newest)
                step = server.plan(counts)
                plans[way].append(describe(server, step))
            if newest % 3 == 2:
                server.end(newest - 1)
    assert plans["kernel"] == plans["torch"]
    assert len({len(plan) for plan in plans["torch"]}) > 2, "some steps have segments"


def describe(server, step) -> list:
    """A plan, with pages in place of slots, of which any free one may be taken."""
    page_of = server.planner._page_of

    def flatten(name, value) -> list:
        if isinstance(value, torch.Tensor):
            return [(page_of[value.long()] if name == "slots" else value).tolist()]
        if isinstance(value, dict):
            return [each for item in value.items() for each in flatten(*item)]
        if isinstance(value, list | tuple):
            return [each for inner in value for each in flatten(name, inner)]
        return [value]

    plan = flatten("step", asdict(replace(step, slot_of=None)))
    return [*plan, server.planner.count().tolist()]


@on_gpu
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("format", STORED)
def test_a_captured_step_on_a_gpu_reads_what_the_definition_reads(format, count, device):
    """Two requests that grow, in a graph that is replayed without allocations."""
    settings = settings_of(format, kernel=True)
    on_cpu = Server(settings, tokens=32)
    on_gpu = Server(settings, tokens=32, device=device, dtype=torch.bfloat16)
    rows = {request: to_bfloat16(draw(60, seed=request)) for request in range(2)}
    for server in (on_gpu, on_cpu):
        for request, each in rows.items():
            server.begin(request)
            server.run({request: part_of(each, 0, 20 + 7 * request)})
    query = torch.zeros(2 * count, 2 * HEADS, DIM, dtype=torch.bfloat16, device=device)
    new = {side: torch.zeros_like(query[:, :HEADS]) for side in SIDES}
    output, graph = torch.zeros_like(query), torch.cuda.CUDAGraph()
    for at in range(20, 50, count):
        now = {r: part_of(each, at + 7 * r, at + 7 * r + count) for r, each in rows.items()}
        step = on_gpu.plan({0: count, 1: count})
        step = replace(step, max_pages=WIDTH)
        for side in SIDES:
            new[side].copy_(torch.cat([each[side] for each in now.values()]))
        query.copy_(torch.cat([query_of(each["key"]) for each in now.values()]))

        def run(step=step):
            on_gpu.reader.run(step, query, new, SCORES, output)

        if at == 20:
            run()  # compiles
            with torch.cuda.graph(graph):
                run()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        graph.replay()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        expected = torch.cat([*on_cpu.run(now).values()])
        # Rounding the output to bfloat16 makes 1.7e-3 by itself, and a code may flip.
        assert (output.cpu() - expected).norm() / expected.norm() < 0.02


@on_gpu
@pytest.mark.parametrize("new", [1, 8])
@pytest.mark.parametrize(("batch", "context"), [(1, 20_000), (8, 3000), (1, 300)])
def test_reading_while_storing_is_reading_after_it(batch, context, new, device):
    """In pages and windows of an 8B model's shape, whose new tokens weigh more than all others."""
    shape = benchmark_pages.Shape(batch, context)
    settings = benchmark_pages.settings_of(shape, "vllm")
    server = benchmark_pages.Server(shape, settings, 1, verified=new)
    layers = [server.layers[0], copy.deepcopy(server.layers[0])]
    step = server.step(new, new)
    assert step.decode.copied
    for seed in range(50):
        generator = torch.Generator(device).manual_seed(seed)
        size = batch * new, shape.kv_heads, shape.dim
        drawn = torch.randn(2, *size, generator=generator, device=device).bfloat16()
        rows = dict(zip(SIDES, drawn, strict=True))
        query = rows["key"].repeat_interleave(shape.heads // shape.kv_heads, 1)
        outputs = [torch.full_like(query, torch.nan) for _ in layers]
        LayerReader(layers[0]).run(step, query, rows, SCORES, outputs[0])
        layers[1].copy(step, rows)
        layers[1].store(step, rows)
        layers[1].attend(step, query, SCORES, outputs[1])
        assert torch.equal(*outputs)
        for side in SIDES:
            for name in ("memory", "copies"):
                assert torch.equal(*(getattr(layer, name)[side][1:] for layer in layers))


@on_gpu
@pytest.mark.parametrize("format", STORED)
def test_prompts_read_on_a_gpu_what_they_read_in_torch(format, device):
    settings = settings_of(format, kernel=True)
    on_cpu = Server(settings, tokens=32, segment=7)
    on_gpu = Server(settings, tokens=32, device=device, dtype=torch.bfloat16, segment=7)
    rows = {request: to_bfloat16(draw(70, seed=request)) for request in range(3)}
    for begin, end in [(0, 20), (20, 45), (45, 46), (46, 70)]:
        now = {
            request: part_of(each, max(0, begin - request), end - request)
            for request, each in rows.items()
        }
        read = []
        for server in (on_gpu, on_cpu):
            for request in rows:
                if not begin:
                    server.begin(request)
            read.append(torch.cat([*server.run(now).values()]).float())
        assert (read[0] - read[1]).norm() / read[1].norm() < 0.02, "bfloat16's rounding"


def to_bfloat16(rows):
    return {side: each.bfloat16().float() for side, each in rows.items()}


def test_a_cell_takes_what_the_format_says():
    assert cell_bytes(settings_of("vllm"), DIM, 0) == 2 * (4 + 4)
    assert cell_bytes(settings_of("sglang"), DIM, 0) == 2 * (4 + 8)
    with pytest.raises(RotationZooError, match="transform coding, and no nearest"):
        replace(settings_of(), layout=CacheLayout(SEGMENTS))


def test_a_cell_has_room_for_the_heads_of_any_process():
    """Rows of 8 and 4 bytes of keys, and 4 and 0 of values. A layer without bits has pages, too."""
    settings = settings_of("segments")
    widths = {"key": [[4, 3, 1, 0], [1, 1, 1, 1]], "value": [[2, 2, 1, 1], [0] * 4]}

    def spend(_, side, rotation):
        return replace(rotation, widths=torch.tensor(widths[side]))

    def cell(held):
        rotations = settings.codec.rotations.replace(spend)
        codec = replace(settings.codec, rotations=rotations)
        return cell_bytes(replace(settings, codec=codec), DIM, 0, held=held)

    rows = [SegmentLayout(tuple(map(tuple, widths[side])), 8).row_bytes for side in SIDES]
    assert rows == [[8, 4], [4, 0]]
    assert (cell(None), cell(2), cell(1)) == (8, 8, 12)
    widths |= {"key": [[1, 1, 1, 0], [0] * 4]}
    assert (cell(2), cell(1)) == (4, 8)
    widths |= {side: [[0] * 4] * 2 for side in SIDES}
    assert (cell(2), cell(1)) == (1, 1)


def test_pages_of_another_layer_are_refused():
    geometry = [GEOMETRY[0], replace(GEOMETRY[0], index=1, owner=1)]
    settings = settings_of("segments", geometry=geometry)
    rotations = settings.codec.rotations.replace(
        lambda layer, _, each: replace(each, widths=torch.full((HEADS, 4), 2 + 2 * layer))
    )
    settings = replace(settings, codec=replace(settings.codec, rotations=rotations))
    pages = torch.zeros(4, HEADS, TOKENS, cell_bytes(settings, DIM, 0), dtype=torch.uint8)
    LayerPages(settings, 0, pages, 2, torch.float32)
    with pytest.raises(RotationZooError, match="a page of layer 1 takes 384 bytes, and has 256"):
        LayerPages(settings, 1, pages, 2, torch.float32)
