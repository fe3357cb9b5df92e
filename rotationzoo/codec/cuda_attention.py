"""Attention over packed keys and values on an NVIDIA GPU: `attention.cu` launched, as
`codec.attention` defines it."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from rotationzoo.codec.attention import ExactWindow, PackedSide, PackedTokens, Scores
from rotationzoo.codec.cuda import TYPES, build
from rotationzoo.codec.pages import PageLayout
from rotationzoo.errors import RotationZooError

SOURCE = Path(__file__).with_name("attention.cu")
_LARGEST_DIM, _MOST_GROUPS, _TILE = 256, 8, 32
_PREPARE_THREADS, _FINISH_THREADS = 1024, 512
_EARLY = {"programmatic_stream_serialization": True}
_MOST_TOTALS = 1024  # of columns and parts in a block of `finish`, as in the source
_SHARED_MEMORY = 48 * 1024 - 64  # bytes: `ROOM` in the source
_SHORTEST_SPLIT = 256  # tokens: shorter ones take longer to merge than to read
_WAVES = 3
"""How often all blocks that a GPU holds at once should be replaced, so that none is left alone with
the last of them."""


@dataclass(frozen=True)
class Variant:
    """What the kernels are compiled for."""

    key: PageLayout
    value: PageLayout
    dtype: torch.dtype
    """Of queries and exact rows."""
    soft_cap: bool
    columns: int
    """That a block handles: query heads of a KV head times query tokens, or a part of them."""

    @property
    def warps(self) -> int:
        """Warps of a block of `attend`: four, where the shared memory of a block has room for two
        tiles of each."""
        bytes_of_a_tile = 0
        for layout in (self.key, self.value):
            metadata = 2 * layout.groups * layout.format.metadata_bits // 8
            bytes_of_a_tile += _TILE * (layout.dim // 4 + metadata)
        return 4 if 8 * bytes_of_a_tile <= _SHARED_MEMORY else 2

    def macros(self) -> tuple[tuple[str, str], ...]:
        """The macros that compile the source into this variant."""
        format = self.key.format
        values = {
            "KEY_DIM": self.key.dim,
            "VALUE_DIM": self.value.dim,
            "KEY_GROUP": self.key.dim // self.key.groups,
            "VALUE_GROUP": self.value.dim // self.value.groups,
            "PAGE": self.key.tokens,
            "WARPS": self.warps,
            "COLUMNS": self.columns,
            "TYPE": TYPES[self.dtype],
            "SOFT_CAP": self.soft_cap,
            "HALF": format.metadata == "float16",
            "MINIMUM": format.offset == "minimum",
            "STRIDED": format.packing == "strided",
        }
        return tuple((name, str(int(value))) for name, value in values.items())


@dataclass(frozen=True)
class Kernels:
    """The compiled kernels, and what of them depends on the variant."""

    prepare: Any
    attend: Any
    finish: Any
    finish_many: Any
    threads: int
    """Of a block of `attend`."""
    blocks: int
    """Blocks of `attend` that the GPU holds at once."""

    @property
    def window(self) -> int:
        """Exact tokens that a block of `attend` reads: four threads compare each."""
        return self.threads // 4


def supports(key: PageLayout, value: PageLayout, dtype: torch.dtype) -> bool:
    """Whether the kernels read pages of these layouts with queries of this type."""
    return (
        dtype in TYPES
        and (key.format, key.tokens, key.heads) == (value.format, value.tokens, value.heads)
        and key.tokens % _TILE == 0
        and all(_supports_side(layout) for layout in (key, value))
    )


def _supports_side(layout: PageLayout) -> bool:
    group = layout.dim // layout.groups
    # Codes that share a 32-bit word and a field of its bytes must share a scale.
    run = 4 if layout.format.packing == "strided" else 16
    return (
        layout.tokens_per_scale == 1
        and layout.dim % 16 == 0
        and layout.dim <= _LARGEST_DIM
        and layout.groups <= _MOST_GROUPS
        and group % run == 0
    )


def attend(
    query: torch.Tensor,
    packed: PackedTokens,
    head: ExactWindow,
    tail: ExactWindow,
    scores: Scores,
    splits: int | None = None,
) -> torch.Tensor:
    """The attention output `[B, H_q, T, D_v]`, with the arguments of `attention.attend`.

    `splits` is how many ranges the packed tokens of a row are cut into, one for a thread block
    each; by default as many as keep the GPU busy. Nothing waits for the GPU. Raises
    `RotationZooError` for layouts and types that `supports` says no to.
    """
    result_type = query.dtype
    for window in (head, tail):
        query = query.to(torch.promote_types(query.dtype, window.key.dtype))
    layout = packed.key.layout
    batch, query_heads, tokens, _ = query.shape
    columns = query_heads // layout.heads * tokens
    soft_cap = scores.soft_cap is not None
    width = choose_columns(columns, layout, packed.value.layout)
    tiles = -(-columns // width)
    variant = Variant(layout, packed.value.layout, query.dtype, soft_cap, width)
    if not supports(variant.key, variant.value, query.dtype):
        raise RotationZooError(
            f"the CUDA kernel does not read pages of {variant.key} and {variant.value} with "
            f"{query.dtype} queries",
            hint="use codec.attention.attend",
        )
    kernels = compiled(variant, query.device)
    # A block of `finish` keeps a maximum and a sum of every part.
    windows = sum(-(-window.key.shape[2] // kernels.window) for window in (head, tail))
    if splits is None:
        room = len(packed.key.blocks) * layout.tokens
        splits = choose_splits(kernels.blocks, batch * layout.heads * tiles, windows, room)
    splits = min(splits, _MOST_TOTALS - windows)
    parts, padded = windows + splits, tiles * width

    query = query.contiguous()
    rows = batch, layout.heads, padded
    prepared = query.new_empty(*rows, 2, -(-layout.dim // 64) * 64, dtype=torch.int8)
    headers = query.new_empty(*rows, 2 + layout.groups, dtype=torch.float32)
    totals = headers.new_empty(*rows, parts, 2)
    outputs = headers.new_empty(*rows, parts, variant.value.dim)
    result = query.new_empty(batch, query_heads, tokens, variant.value.dim)
    launch = Launcher(query.device)
    matrix, mean = _transform(packed.key)
    launch(
        kernels.prepare,
        (layout.heads, tiles, batch),
        _PREPARE_THREADS,
        *(query, columns, matrix, mean, scores.scale, prepared, headers),
    )
    tables = [side.addresses().contiguous() for side in (packed.key, packed.value)]
    pages = [table.shape[1] for table in tables]
    launch(
        kernels.attend,
        (parts, layout.heads * tiles, batch),
        kernels.threads,
        *(query, columns, tokens, prepared, headers, *tables, *pages),
        *(packed.lengths, splits, tiles, *_window(head, query.dtype), *_window(tail, query.dtype)),
        *(scores.scale, scores.soft_cap or 0.0, totals, outputs),
        early=True,
    )
    matrix, mean = _transform(packed.value)
    sinks = None if scores.sinks is None else scores.sinks.float().contiguous()
    groups = _FINISH_THREADS // (128 if variant.value.dim <= 128 else 256)
    many = columns * layout.heads * batch > kernels.blocks and groups * parts <= _MOST_TOTALS
    launch(
        kernels.finish_many if many else kernels.finish,
        (-(-columns // groups) if many else columns, layout.heads, batch),
        _FINISH_THREADS,
        *(totals, outputs, columns, padded, parts, windows, tokens, matrix, mean, sinks, result),
        early=True,
    )
    return result.to(result_type)


def choose_columns(columns: int, key: PageLayout, value: PageLayout) -> int:
    """How many of so many columns one block handles."""
    # Beyond that, a warp's sums do not fit into its registers.
    wide = max(key.dim, value.dim) <= 128 and key.groups == value.groups == 1
    return 8 if columns > 4 and wide else 4


def choose_splits(blocks: int, heads: int, windows: int, tokens: int) -> int:
    """Into how many ranges `tokens` packed tokens of each of so many heads (of all rows and tiles
    of columns) are cut, where a GPU holds `blocks` thread blocks at once and `windows` more are
    needed for the exact tokens of each head."""
    longest = max(1, tokens // _SHORTEST_SPLIT)
    # A single wave that is full, or several, of which the last may be half empty.
    wanted = blocks // heads - windows
    if wanted < 4:
        wanted = -(-_WAVES * blocks // heads)
    return max(1, min(wanted, longest))


class Launcher:
    """Launches kernels on torch's current stream of one GPU."""

    def __init__(self, device: torch.device):
        from cuda.core import Stream

        self.device = device
        with torch.cuda.device(device):
            self.stream = Stream.from_handle(torch.cuda.current_stream().cuda_stream)

    def __call__(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        threads: int,
        *arguments: torch.Tensor | float | None,
        early: bool = False,
    ) -> None:
        """Launch a kernel with the arguments of the function in the source. With `early` it may
        start before the one before it has ended, which it must wait for itself."""
        from cuda.core import LaunchConfig, launch

        values = [_value(argument) for argument in arguments]
        config = LaunchConfig(grid=grid, block=threads, **_EARLY if early else {})
        with torch.cuda.device(self.device):
            launch(self.stream, config, kernel, *values)


def _value(argument: torch.Tensor | float | None) -> int | float:
    """What a kernel gets: an address, a 64-bit integer or a double."""
    if argument is None:
        return 0
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument


def _transform(side: PackedSide) -> tuple[torch.Tensor, torch.Tensor | None]:
    mean = side.mean
    return side.matrix.float().contiguous(), None if mean is None else mean.float().contiguous()


def _window(
    window: ExactWindow, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int]:
    rows = window.key.to(dtype).contiguous(), window.value.to(dtype).contiguous()
    return *rows, window.lengths, window.key.shape[2]


@cache
def compiled(variant: Variant, device: torch.device) -> Kernels:
    """The kernels of a variant, compiled for this GPU or taken from the cache. Raises
    `RotationZooError` where cuda.core or NVRTC is missing."""
    code = build(SOURCE.read_text(), variant.macros(), device)
    attend = code.get_kernel("attend")
    threads = 32 * variant.warps
    resident = attend.occupancy.max_active_blocks_per_multiprocessor(threads, 0)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return Kernels(
        code.get_kernel("prepare"),
        attend,
        code.get_kernel("finish"),
        code.get_kernel("finish_many"),
        threads,
        resident * processors,
    )
