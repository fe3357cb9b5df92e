"""The CUDA sources of a server's pages, run on a CPU: what they restore and store is what torch's
operations do."""

import pytest
import torch
from support.cases import quick_first
from support.codec import on_cpu
from support.server_pages import DIM, HEADS, WIDTH, Server, draw, settings_of

from rotationzoo.codec import cuda_encoder
from rotationzoo.rotations import SIDES
from rotationzoo.vllm import prompts
from rotationzoo.vllm.segments import Known

pytestmark = [on_cpu, pytest.mark.usefixtures("programs_on_cpu")]
FORMATS = quick_first(["vllm", "sglang"])  # each is compiled anew


@pytest.mark.parametrize("format", FORMATS)
def test_prompts_read_rows_that_torch_restores(format, monkeypatch):
    """Three requests, of which one begins, in windows and segments that end inside others. Two have
    a value that is not finite, in codes and among new rows: kernels hand on a key of NaN in its
    place, and values that are finite, also behind the last token."""
    server = Server(settings_of(format, kernel=True), segment=7)
    for request in range(3):
        server.begin(request)
    before = {request: draw(13 + 9 * request, seed=request) for request in range(2)}
    before[1]["value"][9, 1, 2] = torch.inf
    server.run(before)
    step = server.plan({0: 9, 1: 14, 2: 3})
    rows = draw(26, seed=9)
    rows["value"][24, 0, 5] = torch.nan
    ways = []
    for has_kernel in (False, True):
        monkeypatch.setattr(prompts, "kernels_run_on", lambda device, has=has_kernel: has)
        exact, codes = step.prompts.exact, step.prompts.codes
        parts = [empty(has_kernel) for _ in (*exact, *codes)]
        for group, into in zip(exact, parts, strict=False):
            server.reader._gather(step, group, rows, into)
        for segment, into in zip(codes, parts[len(exact) :], strict=True):
            server.reader._restore(step.prompts.page_table, segment, into)
        ways.append(torch.stack(parts if has_kernel else [*map(with_finite_values, parts)]))
    assert len(step.prompts.exact) == 3
    assert len(step.prompts.codes) > 2
    torch.testing.assert_close(*ways, rtol=0, atol=0, equal_nan=True)
    assert ways[1][:, 0].isnan().all(-1).sum() == 2
    assert ways[0][:3].any(-1).any(-1).sum() > 2 * 26


def empty(has_kernel: bool) -> torch.Tensor:
    """Room for 30 keys and values; what is there of values may be anything."""
    into = torch.zeros(2, 30, HEADS, DIM)
    into[1] = torch.nan if has_kernel else 0
    return into


def with_finite_values(into: torch.Tensor) -> torch.Tensor:
    keys, values = into
    is_bad = ~values.isfinite().all(-1, keepdim=True)
    return torch.stack([keys.masked_fill(is_bad, torch.nan), values.masked_fill(is_bad, 0)])


@pytest.mark.parametrize("format", FORMATS)
def test_many_tokens_are_stored_as_torch_stores_them(format, monkeypatch):
    """One value is too large, and padding is infinite."""
    settings, rows, kept = settings_of(format, kernel=True), draw(13), []
    rows["value"][9, 1, 3] = 1e30
    for has_kernel in (False, True):
        monkeypatch.setattr(cuda_encoder, "kernels_run_on", lambda device, has=has_kernel: has)
        server = Server(settings)
        server.begin(0)
        server.layer.store(server.plan({0: 13}), rows)
        server.layer.store(padding(server), INFINITE)
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


INFINITE = {side: torch.full((1, HEADS, DIM), torch.inf) for side in SIDES}


def padding(server):
    """A step with a token of nobody."""
    numbers = torch.zeros(1, WIDTH, dtype=torch.int32), torch.tensor([0]), torch.tensor([0])
    known = Known(torch.tensor([1]), torch.tensor([0]), 1)
    return server.planner.plan(*numbers, torch.tensor([-1]), known)
