"""The CUDA sources of a server's pages, run on a CPU: what they restore and store is what torch's
operations do."""

import pytest
import torch
from support.codec import CpuLauncher, compile_for_cpu, on_cpu
from support.server_pages import DIM, HEADS, Server, draw, part_of, settings_of

from rotationzoo.codec import cuda
from rotationzoo.codec.cuda import Kernel, Variant
from rotationzoo.codec.cuda_encoder import feedback_encoder
from rotationzoo.rotations import SIDES
from rotationzoo.vllm import pages, prompts
from rotationzoo.vllm.pages import LayerPages

pytestmark = on_cpu
# Each is compiled anew; one with offsets and one with third bits tell most.
FORMATS = [
    "vllm",
    "budget",
    *(pytest.param(each, marks=pytest.mark.thorough) for each in ("wide", "sglang", "fine")),
]


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Makes the kernels of a source for pages of a layout, on the CPU."""
    made = {}

    def compile(path, name, layout, dtype, feedback=False):
        group = layout.dim // layout.groups
        variant = Variant(layout.dim, group, dtype, layout.format, feedback=feedback)
        if (name, layout) not in made:
            folder = tmp_path / f"{name} {len(made)}"
            folder.mkdir()
            text = (variant.source + path.read_text()).replace("1.0f / 0.0f", "HUGE_VALF")
            macros = [*variant.macros(), ("TOKENS", str(layout.tokens)), ("SHARED", "0")]
            library = compile_for_cpu(folder, text, [name], macros, "-ffp-contract=off")
            made[name, layout] = getattr(library, f"launch_{name}")
        return Kernel(made[name, layout], variant.block_rows, variant.threads)

    for module in (pages, prompts):
        monkeypatch.setattr(module, "Launcher", CpuLauncher)
    return compile


@pytest.mark.parametrize("format", FORMATS)
def test_prompts_read_rows_that_torch_restores(format, compiled, monkeypatch):
    """Three requests, of which one begins, in windows and segments that end inside others."""
    server = Server(settings_of(format, "feedback", kernel=True), segment=7)
    for request in range(3):
        server.begin(request)
    server.run({request: draw(13 + 9 * request, seed=request) for request in range(2)})
    step = server.plan({0: 9, 1: 14, 2: 3})
    rows = draw(26, seed=9)
    ways = []
    for has_kernel in (False, True):
        monkeypatch.setattr(prompts, "kernels_run_on", lambda device, has=has_kernel: has)
        monkeypatch.setattr(
            prompts,
            "_restore_kernel",
            lambda name, layout, dtype, device: compiled(prompts._RESTORE, name, layout, dtype),
        )
        parts = []
        for group in step.prompts.exact:
            into = torch.zeros(2, 30, HEADS, DIM)
            server.reader._gather(step, group, rows, into)
            parts.append(into)
        for segment in step.prompts.codes:
            into = torch.zeros(2, 30, HEADS, DIM)
            server.reader._restore(step.prompts.page_table, segment, into)
            parts.append(into)
        ways.append(torch.stack(parts))
    assert len(step.prompts.exact) == 3
    assert len(step.prompts.codes) > 2
    assert torch.equal(*ways)
    assert ways[0][:3].any(-1).any(-1).sum() > 2 * 26


@pytest.mark.parametrize("format", FORMATS)
def test_few_tokens_are_stored_as_torch_stores_them(format, compiled, monkeypatch):
    """Of rows that are multiplied by the matrices in the same order, bit by bit."""
    settings = settings_of(format, "feedback", kernel=True)
    servers = [Server(settings), Server(settings)]
    rows, device = draw(20), torch.device("cpu")
    monkeypatch.setattr(cuda, "compiled", lambda *_: object())
    encoders = {
        side: feedback_encoder(rotation.feedback, variant_of(servers[1], side), device)
        for side, rotation in ((side, settings.codec.rotations[0][side]) for side in SIDES)
    }
    monkeypatch.setattr(
        pages,
        "_few_kernel",
        lambda layout, dtype, device: (
            compiled(pages._STORE_FEW, "store_few", layout, dtype, feedback=True).function
        ),
    )
    for server in servers:
        server.begin(0)
        if server is servers[1]:
            monkeypatch.setattr(LayerPages, "find_few", lambda *_: list(encoders.values()))
        for new in (part_of(rows, 0, 13), part_of(rows, 13, 14), part_of(rows, 14, 20)):
            server.layer.store(server.plan({0: len(new["key"])}), new)
    for side in SIDES:
        mine, definition = (server.layer.memory[side] for server in servers)
        # Sums come in another order, and a code near a boundary may flip.
        assert (mine != definition).float().mean() < 0.01
        assert mine.any()
        assert not encoders[side].refused


def variant_of(server, side) -> Variant:
    layout = server.layer.layouts[side]
    return Variant(layout.dim, layout.dim // layout.groups, torch.float32, layout.format)
