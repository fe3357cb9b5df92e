"""The decode kernel for latents: equal to attention in float64 on a CPU, which runs the same
source, and on a GPU."""

import ctypes
import math
from dataclasses import dataclass

import pytest
import torch
from support.codec import CpuLauncher, on_cpu
from support.decode_cases import error_of, quantize

from rotationzoo.codec import attention, cuda_latents, kernels
from rotationzoo.codec.attention import ExactWindow, PackedSide, PackedTokens, Scores
from rotationzoo.codec.cuda_latents import Frame, Kernels, LatentVariant
from rotationzoo.codec.formats import FORMATS
from rotationzoo.codec.page_layout import PageLayout
from rotationzoo.vllm.latents import LatentKeys

PAGE, SCALE = 64, 0.07


@dataclass(frozen=True)
class Case:
    """What one call gets."""

    format: str = "vllm"
    rank: int = 256
    rope: int = 64
    heads: int = 5
    new: int = 1
    lengths: tuple[int, ...] = (333, 0, 70)
    """Packed tokens of each request."""
    starts: tuple[int, ...] = (64, 0, 64)
    recent: int = 100
    """Exact tokens at the end."""
    dtype: torch.dtype = torch.bfloat16
    mean: bool = False
    device: str = "cpu"
    splits: int | None = None


@dataclass(frozen=True)
class Inputs:
    """The pages, windows and queries of a case."""

    query: torch.Tensor
    packed: PackedTokens
    windows: tuple[ExactWindow, ExactWindow]
    memory: torch.Tensor


def draw(case: Case) -> Inputs:
    """Random rows in pages. What nobody may read is not a number."""
    generator = torch.Generator(case.device).manual_seed(case.rank + case.heads)
    make = {"generator": generator, "device": case.device}
    batch, count = len(case.lengths), -(-max(case.lengths) // PAGE) + 1
    layout = PageLayout(1, case.rank, 1, PAGE, FORMATS[case.format])
    rotation = torch.linalg.qr(torch.randn(case.rank, case.rank, **make)).Q
    mean = torch.randn(1, case.rank, **make) if case.mean else None
    rows = torch.randn(batch * count, 1, PAGE, case.rank, **make)
    rope = torch.randn(batch * count, PAGE, case.rope, **make).to(case.dtype)
    memory = torch.zeros(
        1 + batch * count, layout.bytes + rope[0].numel() * 2, dtype=torch.uint8, device=case.device
    )
    pages = memory[1:]
    for section, part in zip(
        layout.view(pages[:, : layout.bytes]), quantize(layout, rows), strict=True
    ):
        section[:] = part
    exact = pages[:, layout.bytes :].view(case.dtype).unflatten(1, (PAGE, case.rope))
    exact[:] = rope
    for row, length in enumerate(case.lengths):
        for page in range(count):
            unread = exact[row * count + page, max(0, length - page * PAGE) :]
            unread.fill_(math.nan)
    table = 1 + torch.arange(batch * count, device=case.device).view(batch, count)
    blocks = [memory[table[:, page], : layout.bytes] for page in range(count)]
    side = PackedSide(blocks, layout, rotation[None].contiguous(), mean)
    keys = LatentKeys(
        side.blocks, layout, side.matrix, mean, table, memory.data_ptr(), memory.shape[1],
        [exact[table[:, page] - 1][:, None] for page in range(count)],
    )  # fmt: skip
    numbers = torch.tensor((case.lengths, case.starts), dtype=torch.int32, device=case.device)
    lengths, starts = numbers
    packed = PackedTokens(keys, side, lengths, starts, (lengths - case.new + 1).clamp(min=0))
    key = case.rank + case.rope
    slots = torch.randperm(batch * 4, **make).int().view(batch, 4)
    copies = torch.randn(batch * 4, 1, PAGE, key, **make).to(case.dtype)
    copies[slots[:, 0].long(), :, 60:] = math.nan
    copies[slots[:, 3].long(), :, 10:] = math.nan
    sinks = torch.full_like(lengths, 60)
    ends = torch.full_like(lengths, 2 * PAGE + 10)
    begins = ends - case.recent
    sink = ExactWindow(copies, copies[..., : case.rank], sinks, None, slots[:, :1].contiguous())
    recent = ExactWindow(copies, copies[..., : case.rank], ends, begins, slots[:, 1:].contiguous())
    query = torch.randn(batch, case.new, case.heads, key, **make).to(case.dtype)
    return Inputs(query, packed, (sink, recent), memory)


def reference(inputs: Inputs) -> torch.Tensor:
    """What is read, by the definition, in float64."""
    query = inputs.query.double().transpose(1, 2)
    read = attention.attend(query, inputs.packed, *inputs.windows, Scores(SCALE))
    return read.transpose(1, 2)


def attend(case: Case, inputs: Inputs) -> torch.Tensor:
    output = torch.full_like(inputs.query[..., : case.rank], math.nan)
    frame = Frame.of(inputs.packed.value, case.dtype)
    cuda_latents.attend(inputs.query, inputs.packed, inputs.windows, frame, SCALE, output)
    return output


@pytest.fixture
def on_emulated_gpu(monkeypatch, compile_program):
    """`cuda_latents.attend` on a CPU, from these pages."""

    def prepare(memory: torch.Tensor, blocks: int = 8) -> None:
        def compiled(variant: LatentVariant, device: torch.device) -> Kernels:
            functions = compile_program("latents.cu", variant.macros())
            ends = memory.data_ptr(), memory.data_ptr() + memory.numel()
            functions.set_pages((ctypes.c_ulonglong * 2)(*ends), 1)
            made = [functions[f"launch_{name}"] for name in kernels.PROGRAMS["latents.cu"]]
            return Kernels(*made, blocks)

        monkeypatch.setattr(cuda_latents, "compiled", compiled)
        monkeypatch.setattr(cuda_latents, "Launcher", CpuLauncher)

    return prepare


CASES = {
    "one head": Case(heads=1),
    "strided": Case("sglang", dtype=torch.float16, heads=20),
    "wide": Case(rank=512, heads=16, lengths=(130, 40), starts=(64, 40)),
    "new tokens": Case(new=3, heads=13, mean=True, dtype=torch.float16),
    "tiles": Case(heads=65, lengths=(200,), starts=(64,), rope=32),
}


@on_cpu
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_on_a_cpu(case, on_emulated_gpu):
    inputs = draw(case)
    on_emulated_gpu(inputs.memory)
    error = error_of(attend(case, inputs), reference(inputs))
    print(error)
    assert error.row < 1
