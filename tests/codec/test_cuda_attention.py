"""The decode kernel against attention in float64, on a CPU and on a GPU."""

import ctypes
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support.cases import quick_first
from support.codec import ON_GPU, ONLY_COMPILE, CpuLauncher, compile_kernels, on_cpu, on_gpu
from support.decode_cases import DIMS, SEGMENTS, Case, Drawing, Inputs, error_of, reference
from torch.utils._python_dispatch import TorchDispatchMode

from rotationzoo.codec import attention, cuda_attention, kernels
from rotationzoo.codec.attention import ExactWindow
from rotationzoo.codec.cuda_attention import (
    AttentionVariant,
    Kernels,
    choose_columns,
    choose_splits,
    choose_windows,
    supports,
)
from rotationzoo.codec.formats import FORMATS, SIMULATED
from rotationzoo.codec.page_layout import PageLayout
from rotationzoo.errors import RotationZooError

FLOAT = torch.float32
# Requests that end in a tile, at its end, and before the first. The rest of a page is NaN.
SMALL = Case(
    "small", kv_heads=1, lengths=(35, 0, 96), head=(3, 0, 2), tail=(5, 3, 9), page=32, means=True,
    query_type=FLOAT, window_type=FLOAT, unread=math.nan,
)  # fmt: skip


def layouts(format: str, dim: int, groups: int = 1) -> tuple[Any, Any]:
    """Keys and values of this format."""
    if format == SEGMENTS:
        return Drawing(Case("", SEGMENTS, dim, bits=(5, 4)), "cpu").layouts()
    layout = PageLayout(2, dim, groups, 64, SIMULATED[format])
    return layout, layout


@pytest.mark.parametrize("format", [*FORMATS, SEGMENTS])
@pytest.mark.parametrize("dim", DIMS)
def test_every_format_and_head_dimension_is_supported(format, dim):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert supports(*layouts(format, dim), dtype)
    assert not supports(*layouts(format, dim), torch.float64)


KEY, VALUE = layouts(SEGMENTS, 128)
PLAIN, _ = layouts("vllm", 128)
UNSUPPORTED = {
    "heads": (PLAIN, replace(PLAIN, heads=4)),
    "formats": (PLAIN, replace(PLAIN, format=SIMULATED["sglang"])),
    "groups": (replace(PLAIN, groups=16),) * 2,
    "tokens": (replace(PLAIN, tokens=48),) * 2,
    "odd channels": (replace(PLAIN, dim=120),) * 2,
    "many channels": (replace(PLAIN, dim=272),) * 2,
    "keys of segments": (KEY, PLAIN),
    "heads of segments": (KEY, replace(VALUE, widths=VALUE.widths[:1])),
    "tokens of segments": (replace(KEY, tokens=48), replace(VALUE, tokens=48)),
}


@pytest.mark.parametrize("pair", UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_what_is_not_supported(pair):
    assert not supports(*pair, FLOAT)


def test_rows_of_segments_that_are_too_long_are_not_supported():
    """Two tiles for each of two warps: 192 bytes of keys and 176 of values, and one word more."""
    narrow = replace(KEY, widths=((8,) * 43 + (0,) * 21,) * 2)
    for words, supported in ((47, True), (48, False)):
        wide = replace(KEY, widths=((8,) * words + (0,) * (64 - words),) * 2)
        assert supports(wide, narrow, FLOAT) == supported


def test_what_is_not_supported_is_refused():
    inputs = Drawing(replace(SMALL, dim=24, head=1, tail=1), "cpu").inputs()
    with pytest.raises(RotationZooError, match="does not read pages"):
        cuda_attention.attend(*inputs.arguments())


def assert_right(output: torch.Tensor, inputs: Inputs, most: float) -> None:
    """Compare a float32 output. Its error is that of scores, whose queries have 16 bits."""
    assert output.dtype == inputs.query.dtype
    assert error_of(output, reference(inputs)).row < most


def spread(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers with others between them."""
    return torch.stack([tensor, torch.full_like(tensor, 99)], -1)[..., 0]


def scatter(part: Any, *names: str) -> Any:
    changed = {}
    for name in names:
        if (tensor := getattr(part, name)) is not None:
            changed[name] = spread(tensor if tensor.is_floating_point() else tensor.long())
    return replace(part, **changed)


def scattered(inputs: Inputs) -> Inputs:
    """The same with nothing contiguous but pages, and 64-bit lengths."""
    windows = inputs.head, inputs.tail
    head, tail = (scatter(each, "key", "value", "lengths", "starts", "slots") for each in windows)
    packed = scatter(inputs.packed, "lengths", "starts", "floors")
    key, value = (scatter(side, "matrix", "mean") for side in (packed.key, packed.value))
    packed = replace(packed, key=key, value=value)
    return replace(inputs, query=spread(inputs.query), packed=packed, head=head, tail=tail)


class Calls(TorchDispatchMode):
    """Names of torch's operations and of kernels that were launched, in their order."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.names, self.early = [], []
        names = Kernels(
            "prepare", "attend", "finish", "finish_many", threads=128, blocks=1000, preparing=100
        )
        monkeypatch.setattr(cuda_attention, "compiled", lambda variant, device: names)
        monkeypatch.setattr(cuda_attention, "Launcher", lambda device: self.launch)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))

    def launch(self, kernel, grid, threads, arguments, early=True):
        self.names.append(kernel)
        self.early.append(early)


def test_nothing_runs_between_kernels_that_start_early(monkeypatch):
    inputs = Drawing(SMALL, "cpu").inputs()
    with Calls(monkeypatch) as calls:
        cuda_attention.attend(*inputs.arguments())
        assert calls.early == [True, True, True]
        cuda_attention.attend(*scattered(inputs).arguments())
    # The copy of the matrix of keys may be the last kernel before the first one here.
    assert calls.early[3:] == [False, True, True]
    assert calls.names[-3:] == ["prepare", "attend", "finish"]


@pytest.mark.parametrize("heads", [1, 8, 30, 64, 88])
def test_all_blocks_of_a_few_heads_run_at_once(heads):
    windows = choose_windows(blocks=528, heads=heads, chunks=6)
    splits = choose_splits(528, heads, 8192, windows, width=4)
    assert windows > 0
    assert 8192 / splits >= 256
    assert 264 < heads * (windows + splits) <= 528 or 8192 / splits == 256


@pytest.mark.parametrize("heads", [96, 128, 160, 200, 256])
def test_blocks_of_many_heads_fill_whole_waves(heads):
    windows = choose_windows(blocks=528, heads=heads, chunks=6)
    waves = heads * (windows + choose_splits(528, heads, 32768, windows, width=4)) / 528
    assert waves / math.ceil(waves) > 0.85


def test_windows_that_are_too_long_are_not_supported():
    assert supports(*layouts("sglang", 128), FLOAT, exact_tokens=32_000)
    assert not supports(*layouts("sglang", 128), FLOAT, exact_tokens=33_000)
    assert not supports(*layouts("vllm", 256, 8), FLOAT, exact_tokens=17_000)
    inputs = Drawing(SMALL, "cpu").inputs()
    rows = torch.empty(3, 1, 33_000, 128, device="meta")
    with pytest.raises(RotationZooError, match="33,003 exact tokens"):
        cuda_attention.attend(*replace(inputs, tail=ExactWindow(rows, rows)).arguments())


def test_grids_that_are_empty_or_too_large():
    inputs = Drawing(SMALL, "cpu").inputs()
    assert cuda_attention.attend(inputs.query[:, :, :0], *inputs.arguments()[1:]).shape[2] == 0
    for shape in ((70_000, 4, 1, 128), (3, 8, 70_000, 128)):
        query = torch.empty(shape, device="meta")
        with pytest.raises(RotationZooError, match="at once: there may be 65,535 of each"):
            cuda_attention.attend(query, *inputs.arguments()[1:])


@pytest.fixture
def attend_on_cpu(monkeypatch, compile_program) -> Callable[..., torch.Tensor]:
    """`cuda_attention.attend` on a CPU. What kernels do not write is NaN."""

    def compiled(
        blocks: list, resident: int, variant: AttentionVariant, device: torch.device
    ) -> Kernels:
        functions = compile_program("attention.cu", variant.macros())
        starts = [(block.data_ptr(), block.data_ptr() + block.numel()) for block in blocks]
        ends = [end for pair in starts for end in pair]
        functions.set_pages((ctypes.c_ulonglong * len(ends))(*ends), len(blocks))
        made = [getattr(functions, f"launch_{name}") for name in kernels.PROGRAMS["attention.cu"]]
        return Kernels(*made, threads=32 * variant.warps, blocks=resident, preparing=resident)

    def attend(
        query, packed, *others, splits: int | None = None, resident: int = 8
    ) -> torch.Tensor:
        own = partial(compiled, [*packed.key.blocks, *packed.value.blocks], resident)
        monkeypatch.setattr(cuda_attention, "compiled", own)
        monkeypatch.setattr(cuda_attention, "Launcher", CpuLauncher)
        torch.use_deterministic_algorithms(True)  # fills what is allocated with NaN
        try:
            return cuda_attention.attend(query, packed, *others, splits=splits)
        finally:
            torch.use_deterministic_algorithms(False)

    return attend


def record_launches(launched: list) -> Callable[..., None]:
    """`CpuLauncher.__call__` that also keeps the arguments of each kernel."""
    launch = CpuLauncher.__call__

    def call(self, kernel, grid, threads, arguments, *options, **more) -> None:
        launched.append(arguments)
        launch(self, kernel, grid, threads, arguments, *options, **more)

    return call


COMPILED = {"dim": 64, "group": 7}
"""What the first case below has, and other tests."""
MOVED = {"pooled": (30, 0, 50), "floors": (31, 0, 94), "new": 4}
# Each is compiled anew; the first ones tell most. Some have heads without keys or values.
RUN_ON_CPU = [
    ("sglang", COMPILED),
    ("vllm", {"dim": 64, "group_size": 32, "new": 2, "group": 3, "soft_cap": 20}),
    (SEGMENTS, {"dim": 64, "bits": (5, 4), "kv_heads": 2, "group": 3, "new": 2, "soft_cap": 20}),
    ("vllm", {"dim": 64, "tail": (12, 7, 9), **MOVED}),
    ("vllm", {"dim": 80, "group": 5, "sinks": True}),
    ("vllm", {"dim": 64, "head": (3, 0, 40), "tail": (70, 3, 9), "pooled": (0, 0, 50)}),
    ("sglang", {"dim": 96, "group_size": 32, "soft_cap": 20, "means": True}),
    (SEGMENTS, {"dim": 128, "bits": (8, 8), "group": 4}),
    (SEGMENTS, {"dim": 80, "bits": (8, 1), "kv_heads": 2, "sinks": True}),
    (SEGMENTS, {"dim": 96, "bits": (3, 8), "tail": 9, **MOVED}),
    (SEGMENTS, {"dim": 256, "bits": (4, 4), "group": 7}),
    (SEGMENTS, {"dim": 128, "value_dim": 64, "bits": (6, 2), "kv_heads": 3, "group": 8}),
]


@on_cpu
@pytest.mark.parametrize(("format", "changes"), quick_first(RUN_ON_CPU, 3))
def test_the_source_run_on_a_cpu_is_the_definition(format, changes, attend_on_cpu):
    inputs = scattered(Drawing(replace(SMALL, format=format, **changes), "cpu").inputs())
    output = attend_on_cpu(*inputs.arguments(), splits=2)
    assert_right(output, inputs, 2e-4)  # measured: at most 9e-5


# Slots of 32 tokens, of which a block has 64, and rows that do not fill their pieces.
IN_16_BITS = [
    (torch.bfloat16, "vllm", {"dim": 64, "tail": (70, 7, 99), "group": 2, **MOVED}),
    (
        torch.float16,
        SEGMENTS,
        {"dim": 96, "bits": (5, 4), "tail": (70, 7, 99), "group": 5, **MOVED},
    ),
    (torch.bfloat16, "sglang", {"dim": 80, "group": 5, "tail": 70, "soft_cap": 20}),
    (torch.float16, "vllm", {"dim": 112, "value_dim": 48, "head": (3, 0, 40), "group": 3}),
]


@on_cpu
@pytest.mark.parametrize(("dtype", "format", "changes"), quick_first(IN_16_BITS, 2))
def test_exact_tokens_in_16_bits_are_the_definition(dtype, format, changes, attend_on_cpu):
    changes = {"query_type": dtype, "window_type": dtype, **changes}
    inputs = Drawing(replace(SMALL, format=format, **changes), "cpu").inputs()
    query, *others = inputs.arguments()
    query = torch.nn.functional.pad(query, (1, 0))[..., 1:]  # rows begin anywhere
    for resident in (1, 999):  # a block takes all exact tokens of a head, or one chunk
        output = attend_on_cpu(query, *others, splits=2, resident=resident)
        error = error_of(output, reference(inputs))
        # Measured: 1.8e-3 and 2.9e-4.
        assert error.row < 2.5e-3
        assert error.beyond < 6e-4


UNLIKE = (70, 2500, *[33 + number for number in range(34)], 0, 1500)
"""Packed tokens of more requests than a warp has lanes."""


@on_cpu
@pytest.mark.parametrize("most", [1024, 40], ids=["in proportion", "as many as fit"])
def test_a_long_request_beside_short_ones_has_more_blocks(most, attend_on_cpu, monkeypatch):
    case = replace(SMALL, lengths=UNLIKE, head=3, tail=5, dim=64, group=2, page=64)
    inputs, launched = Drawing(case, "cpu").inputs(), []
    monkeypatch.setattr(cuda_attention, "_MOST_TOTALS", most)
    monkeypatch.setattr(CpuLauncher, "__call__", record_launches(launched))
    output = attend_on_cpu(*inputs.arguments(), splits=1)
    assert_right(output, inputs, 2e-4)
    arguments = launched[1]  # of `attend`
    has_written = arguments.totals[0, 0, :, 1].isfinite()
    blocks, tiles = arguments.blocks, [-(-length // 32) for length in UNLIKE]
    each = max(4, -(-sum(tiles) // len(tiles)), -(-max(tiles) // blocks.most))
    shares = [-(-count // each) for count in tiles]
    assert has_written.sum() == blocks.windows * len(tiles) + sum(shares)
    assert max(shares) <= blocks.most
    assert shares[1] > 6


@on_cpu
def test_a_row_of_padding_gets_zeros(attend_on_cpu):
    inputs = Drawing(replace(SMALL, **COMPILED), "cpu").inputs()
    inputs.tail.lengths[1] = 0
    assert inputs.packed.lengths[1] == inputs.head.lengths[1] == 0
    output = attend_on_cpu(*inputs.arguments())
    assert not output[1].any()
    assert not attention.attend(*inputs.arguments())[1].any()
    assert output[0].any()


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=on_cpu), *ON_GPU])
@pytest.mark.parametrize("format", quick_first(["sglang", SEGMENTS]))
def test_a_row_that_is_no_number_reaches_its_readers_alone(format, device, request):
    """A key in codes, a value in codes and a key in a window, each of one request of four."""
    case = replace(SMALL, **COMPILED, lengths=(35, 40, 0, 96), head=2, tail=5)
    case = replace(case, format=format)
    inputs = Drawing(case, device).inputs()
    expected = reference(inputs)
    for row, side in enumerate((inputs.packed.key, inputs.packed.value)):
        sections = side.layout.view(side.blocks[0])
        if format == SEGMENTS:
            sections[0][row, :, 7, :4] |= 1  # the number of its scale is none
        else:
            sections.scale[row, :, 7] = math.nan
    inputs.tail.key[2, :, 3, 9] = math.nan
    inputs.tail.value[2, :, 3, 9] = math.nan
    attend = cuda_attention.attend
    if device == "cpu":
        attend = partial(request.getfixturevalue("attend_on_cpu"), splits=2)
    for output in (attend(*inputs.arguments()), attention.attend(*inputs.arguments())):
        assert output[:3].isnan().all()
        assert error_of(output[3:], expected[3:]).row < 2e-4


@on_gpu
@pytest.mark.parametrize("format", [*FORMATS, SEGMENTS])
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_the_kernel_is_the_definition(format, dim, device):
    for changes in ({}, {"group": 8, "new": 3}, {"lengths": (3000, 31, 300), "page": 64}):
        inputs = Drawing(replace(SMALL, format=format, dim=dim, **changes), device).inputs()
        output = cuda_attention.attend(*inputs.arguments())
        assert_right(output, inputs, 3e-4)  # measured on a CPU: up to 8e-5
        assert torch.equal(output, cuda_attention.attend(*inputs.arguments()))


def list_variants():
    """One; `make check` has every format and dimension, and all other pairs are slow together."""
    yield pytest.param("vllm", 128)
    formats = [*FORMATS, SEGMENTS]
    for row, dim in enumerate(DIMS):
        for column, format in enumerate(formats):
            mark = pytest.mark.slow if (row - column) % len(formats) else pytest.mark.thorough
            yield pytest.param(format, dim, marks=mark)


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
@pytest.mark.parametrize(("format", "dim"), [*list_variants()])
def test_every_variant_compiles(format, dim, tmp_path):
    pair = layouts(format, dim)
    for columns in {choose_columns(columns, *pair, torch.bfloat16) for columns in (4, 8, 16)}:
        chosen = AttentionVariant(*pair, torch.bfloat16, soft_cap=False, columns=columns)
        compile_kernels(kernels.read("attention.cu"), chosen.macros(), tmp_path, ONLY_COMPILE)
