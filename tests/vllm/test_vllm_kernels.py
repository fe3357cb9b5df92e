"""The CUDA kernels of a server's pages store and restore what torch does, on a CPU, which runs the
same source, and those of transform coding also on a GPU."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.cases import quick_first
from support.codec import gpu, on_cpu
from support.server_pages import DIM, Server, draw, settings_of

from rotationzoo.codec import cuda_encoder, cuda_segments
from rotationzoo.codec.cuda import TYPES
from rotationzoo.errors import RotationZooError
from rotationzoo.geometry import Layer
from rotationzoo.rotations import SIDES
from rotationzoo.vllm import pages, prompts
from rotationzoo.vllm.pages import LayerPages

HEADS, TOKENS = 3, 20
DIMS = quick_first([80, 128, 64, 256])  # each is compiled anew
PLACES = [pytest.param("cpu", torch.float32, marks=on_cpu, id="cpu")]
PLACES += [pytest.param("cuda", dtype, marks=gpu, id=f"cuda {dtype}") for dtype in TYPES]
ON_EACH = pytest.mark.parametrize(("device", "dtype"), PLACES)


@pytest.fixture
def has_kernels(monkeypatch, request, device):
    """Says whether kernels run, which are those of the CPU where there is no GPU."""
    if device == "cpu":
        request.getfixturevalue("programs_on_cpu")

    def choose(has):
        for module in (pages, prompts, cuda_segments):
            monkeypatch.setattr(module, "kernels_run_on", lambda device: has)

    return choose


def settings_for(dim, format="segments"):
    geometry = [Layer(0, 0, 2 * HEADS, HEADS, dim, dim)]
    return settings_of(format, kernel=True, geometry=geometry)


def room_for(dim, has_kernel, device="cpu", dtype=torch.float32) -> torch.Tensor:
    """Room for 30 keys and values; what is there of values may be anything."""
    into = torch.zeros(2, 30, HEADS, dim, device=device, dtype=dtype)
    into[1] = torch.nan if has_kernel else 0
    return into


def with_finite_values(into: torch.Tensor) -> torch.Tensor:
    """As kernels hand on a value that is not finite: with a key of NaN."""
    keys, values = into
    is_bad = ~values.isfinite().all(-1, keepdim=True)
    return torch.stack([keys.masked_fill(is_bad, torch.nan), values.masked_fill(is_bad, 0)])


def with_exact_products(layer: LayerPages) -> None:
    """Give rows that are multiples of 1/4 products without rounding, in steps that codes reach."""
    generator = torch.Generator().manual_seed(1)
    rotations, device = layer.codec.rotations[0], layer.bad.device
    for side in SIDES:
        widths = rotations[side].widths.repeat_interleave(4, -1)[:, None]
        drawn = torch.randint(-4, 5, layer.codec.forward(0, side).shape, generator=generator)
        matrix = drawn * 2.0 ** (widths - 7) * (widths > 0)
        layer.codec._matrices[0, side, "to_steps"] = matrix.to(device)
        mean = torch.randint(-8, 9, rotations[side].mean.shape, generator=generator) / 4
        rotation = replace(rotations[side], mean=mean.to(device))
        rotations = replace(rotations, **{side: rotation})
    layer.codec.rotations[0] = rotations


@ON_EACH
@pytest.mark.parametrize(
    ("few", "spread"), [(0, 0), (0, 10**9), (10**9, 0)], ids=["many rows", "some rows", "few rows"]
)
@pytest.mark.parametrize("dim", DIMS)
def test_pages_hold_what_the_definition_stores(
    dim, few, spread, device, dtype, has_kernels, monkeypatch
):
    """Some keys are infinite or too large, and so is padding. One head stores nothing, but counts
    its bad rows."""
    monkeypatch.setattr(cuda_segments, "FEW", few)
    monkeypatch.setattr(cuda_segments, "SPREAD", spread)
    generator, settings = torch.Generator().manual_seed(2), settings_for(dim)
    shape = TOKENS, HEADS, dim
    rows = {side: torch.randint(-8, 9, shape, generator=generator) / 4 for side in SIDES}
    rows["key"][15, 1, 2], rows["value"][3, 0, 7] = torch.inf, 1e30
    rows["value"][12, 2], rows["key"][-1] = torch.nan, torch.inf
    numbers = torch.randperm(4 * 8, generator=generator)[:TOKENS] + 8
    numbers[-1] = 3  # of page 0
    given = SimpleNamespace(pages=(numbers // 8).to(device), page_offsets=(numbers % 8).to(device))
    held = []
    for has in (False, True):
        has_kernels(has)
        layer = Server(settings, device=device, dtype=dtype).layer
        with_exact_products(layer)
        assert layer.has_segments == has
        layer.store(given, {side: each.to(device, dtype) for side, each in rows.items()})
        held.append((layer.memory, layer.bad.tolist()))
    (definition, expected), (found, bad) = held
    places = [int(numbers[15]), int(max(numbers[3], numbers[12]))]
    assert expected == [[1, places[0]], [2, places[1]]]
    assert [each[0] for each in bad] == [1, 2]
    assert bad[0] == expected[0]
    assert bad[1][1] in numbers[[3, 12]]
    for side in SIDES:
        assert found[side][1:].any()
        assert torch.equal(found[side][1:], definition[side][1:]), side
    assert layer.layouts["value"].row_bytes[-1] == 0


@ON_EACH
def test_a_cache_packs_what_the_definition_packs(device, dtype, has_kernels):
    """And says later that a row could not be stored."""
    settings, dim = settings_for(80), 80
    rows = torch.stack([draw(5, seed, HEADS, dim)["key"].transpose(0, 1) for seed in (1, 2)])
    rows, packed = rows.to(device, dtype), []
    for has in (False, True):
        has_kernels(has)
        codec = settings.for_layer(0, rows, rows).codec
        for side in SIDES:
            packed += codec.pack(rows, 0, side, settings.layout.format)
        assert packed[-1].shape == (2, 1, 5, 0)
    for definition, found in zip(packed[: 2 * HEADS], packed[2 * HEADS :], strict=True):
        assert torch.equal(definition, found)
    encoder = codec.encoder(0, "key", settings.layout.format, rows.device)
    encoder.check()
    rows[1, 0, 2, 3] = torch.inf
    codec.pack(rows, 0, "key", settings.layout.format)
    with pytest.raises(RotationZooError, match="is not finite or exceeds"):
        encoder.check()
    encoder.check()
    assert not codec.pack(rows[:, :, :0], 0, "key", settings.layout.format)[0].numel()


@ON_EACH
@pytest.mark.parametrize("dim", DIMS)
def test_prompts_read_the_levels_of_the_definition(dim, device, dtype, has_kernels):
    """Of two requests, in segments that end inside them. An infinite value or key gives a key of
    NaN."""
    settings, read = settings_for(dim), []
    before = {request: draw(13 + 9 * request, request, HEADS, dim) for request in range(2)}
    before[1]["value"][9, 1, 2] = before[0]["key"][5, 0, 1] = torch.inf
    server = Server(settings, device=device, dtype=dtype, segment=7)
    has_kernels(False)
    for request in before:
        server.begin(request)
    server.run(before)
    step = server.plan({0: 9, 1: 14})
    for has in (False, True):
        has_kernels(has)
        for segment in step.prompts.codes:
            into = room_for(dim, has, device, dtype)
            server.reader._restore(step.prompts.page_table, segment, into)
            if not has:  # it may write anything behind the last row
                into[:, int(segment.bounds[-1]) :] = 0
            read.append(into.cpu())
    count = len(step.prompts.codes)
    for definition, found in zip(read[:count], read[count:], strict=True):
        expected = with_finite_values(definition)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    keys = torch.stack(read[count:])[:, 0]
    assert keys.isnan().all(-1).sum() == 2
    assert keys.any(-1).sum() > 30


# ---- nearest codes


FORMATS = quick_first(["vllm", "sglang"])  # each is compiled anew


@on_cpu
@pytest.mark.usefixtures("programs_on_cpu")
@pytest.mark.parametrize("format", FORMATS)
def test_prompts_read_rows_that_torch_restores(format, monkeypatch):
    """Three requests, of which one begins, in windows and segments that end inside others. For a
    value that is not finite, in codes or among new rows, kernels pass on a key of NaN and finite
    values, even behind the last token."""
    server = Server(settings_for(DIM, format), segment=7)
    for request in range(3):
        server.begin(request)
    before = {request: draw(13 + 9 * request, request, HEADS) for request in range(2)}
    before[1]["value"][9, 1, 2] = torch.inf
    server.run(before)
    step = server.plan({0: 9, 1: 14, 2: 3})
    rows = draw(26, 9, HEADS)
    rows["value"][24, 0, 5] = torch.nan
    ways = []
    for has_kernel in (False, True):
        monkeypatch.setattr(prompts, "kernels_run_on", lambda device, has=has_kernel: has)
        exact, codes = step.prompts.exact, step.prompts.codes
        parts = [room_for(DIM, has_kernel) for _ in (*exact, *codes)]
        for group, into in zip(exact, parts, strict=False):
            server.reader._gather(step, group, rows, into)
        for segment, into in zip(codes, parts[len(exact) :], strict=True):
            server.reader._restore(step.prompts.page_table, segment, into)
        ways.append(torch.stack(parts if has_kernel else [*map(with_finite_values, parts)]))
    assert len(step.prompts.exact) == 3
    assert len(step.prompts.codes) > 2
    torch.testing.assert_close(*ways, rtol=0, atol=0, equal_nan=True)
    assert ways[1][:, 0].isnan().all(-1).sum() == 2
    assert ways[0][:3].any(-1).any(-1).sum() > HEADS * 26


@on_cpu
@pytest.mark.usefixtures("programs_on_cpu")
@pytest.mark.parametrize("format", FORMATS)
def test_many_tokens_are_stored_as_torch_stores_them(format, monkeypatch):
    """One value is too large, and padding is infinite."""
    settings, rows, kept = settings_for(DIM, format), draw(13, heads=HEADS), []
    rows["value"][9, 1, 3] = 1e30
    infinite = {side: torch.full((1, HEADS, DIM), torch.inf) for side in SIDES}
    for has_kernel in (False, True):
        monkeypatch.setattr(cuda_encoder, "kernels_run_on", lambda device, has=has_kernel: has)
        server = Server(settings)
        server.begin(0)
        server.layer.store(server.plan({0: 13}), rows)
        server.layer.store(server.plan_padding(1), infinite)
        layouts = server.layer.layouts
        restored = [
            layouts[side].dequantize(layouts[side].view(memory[1:]))
            for side, memory in server.layer.memory.items()
        ]
        kept.append(torch.stack(restored))
        assert kept[-1][1].isnan().any(-1).sum() == 1
        place = server.tables[0][1] * server.tokens + 1
        assert server.layer.bad.tolist() == [[0, 0], [1, place]]
    torch.testing.assert_close(*kept, rtol=0, atol=0, equal_nan=True)
