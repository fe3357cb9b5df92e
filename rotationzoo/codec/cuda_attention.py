"""Attention over packed keys and values on an NVIDIA GPU, as `codec.attention` defines it: the
arguments of the kernels of `attention.cu`, and how their work is split."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from rotationzoo.codec.attention import ExactWindow, PackedSide, PackedTokens, Scores
from rotationzoo.codec.cuda import TYPES, Launcher, build
from rotationzoo.codec.kernels.parameters import (
    Attend,
    Blocks,
    Finish,
    Pages,
    Prepare,
    Segments,
    Strides,
    Window,
)
from rotationzoo.codec.page_layout import PageLayout
from rotationzoo.codec.slots import TOGETHER, count_slots, list_slots, slot_table
from rotationzoo.codec.transform import SegmentLayout, list_scales
from rotationzoo.errors import RotationZooError

_LARGEST_DIM, _MOST_GROUPS, _TILE = 256, 8, 32
_PREPARE_THREADS, _FINISH_THREADS = 1024, 512
_SMALLEST_SET = 4  # columns of a block of `prepare`, as in the source
_MOST_TOTALS = 1024  # of columns and parts in a block of `finish`, as in the source
_SHARED_MEMORY = 48 * 1024 - 64  # bytes: `ROOM` in the source
_SHORTEST_SPLIT, _SHORTEST_OF_WAVES = 256, 1024  # tokens of a split, which is merged with others
# With fewer splits, much of a GPU waits for the last blocks. Those of many columns start slowly.
_FEW_SPLITS, _FEW_OF_MANY_COLUMNS = 5, 3
_MOST_WAVES, _WAVES_OF_MANY_HEADS = 4, 3  # of blocks
_OF_WINDOWS = 8  # exact tokens get one in so many blocks of a wave
_MOST_BLOCKS = 65_535  # of a grid in its second and third dimension
_WIDE_SLOTS = 24  # of a head, so that a warp's sums of several columns fit into its registers
Layout = PageLayout | SegmentLayout


@dataclass(frozen=True)
class AttentionVariant:
    """The layouts, type and columns that the kernels are compiled for."""

    key: Layout
    value: Layout
    dtype: torch.dtype
    """Of queries and exact rows."""
    soft_cap: bool
    columns: int
    """Of a block: query heads of a KV head times query tokens, or a part of them."""

    @property
    def warps(self) -> int:
        """Warps of a block of `attend`: four, if two tiles of each fit its shared memory."""
        return 4 if 8 * self.tile_bytes <= _SHARED_MEMORY else 2

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile of keys and values, of the largest head."""
        return _TILE * _room(self.key, self.value)

    @property
    def window(self) -> int:
        """Exact tokens that a block of `attend` reads: `WINDOW` in the source."""
        return 8 * self.warps if self.dtype == torch.float32 else 16 * self.warps

    @property
    def in_slot(self) -> int:
        """How many of them lie in one slot: `IN_SLOT` in the source."""
        return self.window if self.dtype == torch.float32 else 16

    @property
    def column_bytes(self) -> int:
        """Bytes of a query that `prepare` writes, two per channel: `COLUMN` in the source."""
        if isinstance(self.key, SegmentLayout):
            return 16 * count_slots(self.key)
        return -(-self.key.dim // 64) * 128

    def macros(self) -> tuple[tuple[str, str], ...]:
        """The macros that compile the source into this variant."""
        format, segments = self.key.format, isinstance(self.key, SegmentLayout)
        values: dict[str, float] = {
            "PAGE": self.key.tokens,
            "WARPS": self.warps,
            "COLUMNS": self.columns,
            "TYPE": TYPES[self.dtype],
            "SOFT_CAP": self.soft_cap,
            "HALF": format.metadata == "float16",
            "MINIMUM": format.offset == "minimum",
            "STRIDED": format.packing == "strided",
            "SEGMENTS": segments,
            "BOTH_ROOM": segments and _room(self.key, self.value),
            "EVEN": _are_even(self.key) and _are_even(self.value),
        }
        for side, layout in (("KEY", self.key), ("VALUE", self.value)):
            values |= {f"{side}_DIM": layout.dim, f"{side}_GROUP": layout.dim // layout.groups}
            values |= {f"{side}_SLOTS": _slots(layout), f"{side}_ROOM": segments and _room(layout)}
        return tuple((name, str(int(value))) for name, value in values.items())


@dataclass(frozen=True)
class Kernels:
    """The compiled kernels of a variant."""

    prepare: Any
    attend: Any
    finish: Any
    finish_many: Any
    threads: int
    """Of a block of `attend`."""
    blocks: int
    """Blocks of `attend` that the GPU holds at once."""
    preparing: int
    """And of `prepare`."""


@cache
def _room(*layouts: Layout) -> int:
    """Bytes of a token in the largest head."""
    most = max(map(sum, zip(*(layout.row_bytes for layout in layouts), strict=False)))
    if isinstance(layouts[0], PageLayout):
        return most
    return max(16, -(-most // 16) * 16)  # few sizes are few variants


def _slots(layout: Layout) -> int:
    return count_slots(layout) if isinstance(layout, SegmentLayout) else 0


def _are_even(layout: Layout) -> bool:
    """Whether all heads of a layer read the same number of slots."""
    if isinstance(layout, PageLayout):
        return True
    return min(map(len, list_slots(layout))) > count_slots(layout) - TOGETHER


def supports(key: Layout, value: Layout, dtype: torch.dtype, exact_tokens: int = 0) -> bool:
    """Whether the kernels read pages of these layouts with queries of this type, and exact windows
    of `exact_tokens` tokens together."""
    # Each window may end with a part of its own, and packed tokens are at least one more.
    variant = AttentionVariant(key, value, dtype, soft_cap=False, columns=4)
    parts = exact_tokens // variant.window + 3
    return (
        parts <= _MOST_TOTALS
        and dtype in TYPES
        and 4 * variant.tile_bytes <= _SHARED_MEMORY  # two of each warp
        and (key.format, key.tokens, key.heads) == (value.format, value.tokens, value.heads)
        and key.tokens % _TILE == 0
        and all(layout.dim % 16 == 0 and layout.dim <= _LARGEST_DIM for layout in (key, value))
        and _has_few_groups(key)
        and _has_few_groups(value)
    )


def _has_few_groups(layout: Layout) -> bool:
    """Whether a token has few enough scales for the kernels."""
    # Codes that share a 32-bit word and a field of its bytes must share a scale.
    run = 4 if layout.format.packing == "strided" else 16
    return layout.groups <= _MOST_GROUPS and layout.dim // layout.groups % run == 0


def choose_columns(columns: int, key: Layout, value: Layout, dtype: torch.dtype) -> int:
    """How many of a tile's `columns` one block handles."""
    # The sums of larger rows do not fit into a warp's registers.
    wide = max(key.dim, value.dim) <= 128 and key.groups == value.groups == 1
    if not wide or max(_slots(key), _slots(value)) > _WIDE_SLOTS:
        return 4
    widest = 8 if dtype == torch.float32 else 16
    return next((width for width in (4, 8) if columns <= width), widest)


def choose_splits(blocks: int, heads: int, tokens: int, windows: int, width: int) -> int:
    """How many splits the `tokens` packed tokens of a head get, of `heads` in all rows and tiles of
    `width` columns. A GPU holds `blocks` blocks at once, of which exact tokens of a head take
    `windows`. All fill as few waves of blocks as there are enough splits in."""
    few = _FEW_SPLITS if width < 16 else _FEW_OF_MANY_COLUMNS
    for waves in range(1, _MOST_WAVES + 1):
        splits = waves * blocks // heads - windows
        if splits >= few:
            break
    else:
        splits = -(-_WAVES_OF_MANY_HEADS * blocks // heads)
    shortest = _SHORTEST_SPLIT if waves == 1 else _SHORTEST_OF_WAVES
    return max(1, min(splits, tokens // shortest))


def choose_windows(blocks: int, heads: int, chunks: int) -> int:
    """How many blocks the exact tokens of a head get, of `heads` in all rows and tiles of columns,
    for `chunks` chunks of them. A block takes several where a head has few blocks in a wave."""
    each = -(-chunks // max(1, blocks // heads // _OF_WINDOWS))
    return -(-chunks // each) if chunks else 0


@cache
def compiled(variant: AttentionVariant, device: torch.device) -> Kernels:
    """The kernels of a variant. Raises `RotationZooError` as `cuda.build` does."""
    code = build("attention.cu", variant.macros(), device)
    names = "prepare", "attend", "finish", "finish_many"
    prepare, attend, finish, many = (code.get_kernel(name) for name in names)
    threads = 32 * variant.warps
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    preparing, resident = (
        processors * kernel.occupancy.max_active_blocks_per_multiprocessor(count, 0)
        for kernel, count in ((prepare, _PREPARE_THREADS), (attend, threads))
    )
    return Kernels(prepare, attend, finish, many, threads, resident, preparing)


def attend(  # noqa: PLR0913 (those of the definition, and two of a GPU)
    query: torch.Tensor,
    packed: PackedTokens,
    head: ExactWindow,
    tail: ExactWindow,
    scores: Scores,
    splits: int | None = None,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """The attention output `[B, H_q, T, D_v]`, with the arguments of `attention.attend`; written to
    `output`, where it is given, of the type of queries and windows.

    The packed tokens of a row get `splits` thread blocks on average, in proportion to their number;
    by default there are enough to keep the GPU busy. Nothing waits for the GPU. The matrix of the
    keys may be read before the last kernel of the stream has ended, so that kernel must not write
    it. Raises `RotationZooError` for what `supports` refuses, and for more rows, or more KV heads
    times queries, than a grid has blocks.
    """
    result_type, dtype = query.dtype, query.dtype
    for window in (head, tail):
        for exact_rows in (window.key, window.value):
            dtype = torch.promote_types(dtype, exact_rows.dtype)
    query = _aligned(query.to(dtype))
    layout = packed.key.layout
    batch, query_heads, tokens, _ = query.shape
    columns = query_heads // layout.heads * tokens
    soft_cap = scores.soft_cap is not None
    width = choose_columns(columns, layout, packed.value.layout, dtype)
    tiles = -(-columns // width)
    variant = AttentionVariant(layout, packed.value.layout, dtype, soft_cap, width)
    _check(variant, (batch, layout.heads * tiles), head, tail)
    shape = batch, query_heads, tokens, variant.value.dim
    result = query.new_empty(shape) if output is None else output
    if not result.numel():  # CUDA refuses an empty grid
        return result.to(result_type)
    kernels = compiled(variant, query.device)
    heads = batch * layout.heads * tiles
    windows = sum(-(-window.tokens // variant.window) for window in (head, tail))
    if dtype != torch.float32:
        windows = choose_windows(kernels.blocks, heads, windows)
    # A block of `finish` keeps a maximum and a sum of every part.
    if splits is None:
        room = len(packed.key.blocks) * layout.tokens
        splits = choose_splits(kernels.blocks, heads, room, windows, width)
    groups = _FINISH_THREADS // (128 if variant.value.dim <= 128 else 256)
    many = columns * layout.heads * batch > kernels.blocks
    many = many and groups * (windows + splits) <= _MOST_TOTALS
    most = _MOST_TOTALS // (groups if many else 1) - windows
    padded = tiles * width

    lengths, starts = (_to(each, torch.int32) for each in (packed.lengths, packed.starts))
    assert lengths is not None
    blocks = Blocks.share(starts, lengths, windows, splits, most)
    strides, scale = Strides(*query.stride()[:3]), float(scores.scale)
    segments = _segments(variant, query.device)
    rows = batch, layout.heads, padded
    prepared = query.new_empty(*rows, variant.column_bytes, dtype=torch.int8)
    headers = query.new_empty(*rows, 2 + layout.groups, dtype=torch.float32)
    totals = headers.new_empty(layout.heads, padded, blocks.total, 2)
    outputs = headers.new_empty(layout.heads, padded, blocks.total, variant.value.dim)
    # All copies are made before the first kernel. Kernels start early: what they read before they
    # wait for the kernel before them must not come from that one.
    prepare = Prepare(
        query=query,
        strides=strides,
        columns=columns,
        tokens=tokens,
        matrix=_to(packed.key.matrix, torch.float32),
        mean=_to(packed.key.mean, torch.float32),
        scale=scale,
        segments=segments.key,
        blocks=blocks,
        padded=padded,
        prepared=prepared,
        headers=headers,
    )
    attend = Attend(
        query=query,
        strides=strides,
        columns=columns,
        tokens=tokens,
        prepared=prepared,
        headers=headers,
        key=_pages(packed.key),
        value=_pages(packed.value),
        segments=segments,
        blocks=blocks,
        floors=_to(packed.floors, torch.int32),
        tiles=tiles,
        sink=_window(head, dtype),
        recent=_window(tail, dtype),
        scale=scale,
        cap=float(scores.soft_cap or 0),
        totals=totals,
        outputs=outputs,
    )
    finish = Finish(
        totals=totals,
        outputs=outputs,
        blocks=blocks,
        columns=columns,
        padded=padded,
        tokens=tokens,
        matrix=_to(packed.value.matrix, torch.float32),
        mean=_to(packed.value.mean, torch.float32),
        sinks=_to(scores.sinks, torch.float32),
        result=result,
        strides=Strides(*result.stride()[:3]),
    )
    launch = Launcher(query.device)
    early = prepare.matrix is packed.key.matrix  # no copy, which may have only just begun
    sets = min(-(-batch * columns // _SMALLEST_SET), max(1, kernels.preparing // layout.heads))
    grid = layout.heads, sets + (batch > 1), 1
    launch(kernels.prepare, grid, _PREPARE_THREADS, prepare, early)
    launch(kernels.attend, (blocks.total, layout.heads * tiles, 1), kernels.threads, attend)
    merge = kernels.finish_many if many else kernels.finish
    of_columns = -(-columns // groups) if many else columns
    launch(merge, (of_columns, layout.heads, batch), _FINISH_THREADS, finish)
    return result if output is not None else result.to(result_type)


def _check(
    variant: AttentionVariant, grid: tuple[int, int], head: ExactWindow, tail: ExactWindow
) -> None:
    """Raise `RotationZooError` for what the kernels cannot take."""
    key, value, dtype = variant.key, variant.value, variant.dtype
    exact = head.tokens + tail.tokens
    in_parts = all(
        window.slots is None or window.key.shape[2] % variant.in_slot == 0
        for window in (head, tail)
    )
    if not in_parts or not supports(key, value, dtype, exact):
        raise RotationZooError(
            f"the CUDA kernel does not read pages of {key} and {value} with {dtype} queries and "
            f"{exact:,} exact tokens",
            hint="use codec.attention.attend",
        )
    if max(grid) > _MOST_BLOCKS:
        raise RotationZooError(
            f"the CUDA kernel cannot take {grid[0]:,} rows of {grid[1]:,} blocks at once: there "
            f"may be {_MOST_BLOCKS:,} of each",
            hint="give fewer rows, or fewer new tokens",
        )


def _aligned(query: torch.Tensor) -> torch.Tensor:
    """Queries whose rows are contiguous and begin at a multiple of 16 bytes."""
    *strides, own = query.stride()
    offsets = query.data_ptr(), *(stride * query.element_size() for stride in strides)
    if own == 1 and not any(offset % 16 for offset in offsets):
        return query
    return query.clone(memory_format=torch.contiguous_format)


def _pages(side: PackedSide) -> Pages:
    table = side.addresses().contiguous()
    return Pages(table, side.base, side.unit, table.shape[1])


def _segments(variant: AttentionVariant, device: torch.device) -> Segments:
    key, value = variant.key, variant.value
    if isinstance(key, PageLayout) or isinstance(value, PageLayout):
        return Segments(None, None, None)
    return Segments(slot_table(key, device), slot_table(value, device), list_scales(device))


def _window(window: ExactWindow, dtype: torch.dtype) -> Window:
    return Window(
        key=_to(window.key, dtype),
        value=_to(window.value, dtype),
        lengths=_to(window.lengths, torch.int32),
        starts=_to(window.starts, torch.int32),
        slots=_to(window.slots, torch.int32),
        room=window.key.shape[2],
        pieces=1 if window.slots is None else window.slots.shape[1],
    )


def _to(tensor: Any, dtype: torch.dtype) -> Any:
    """This tensor, of this type and contiguous; or None."""
    # A server has such tensors: asking them is faster than a call that does nothing.
    if tensor is None or (tensor.dtype == dtype and tensor.is_contiguous()):
        return tensor
    return tensor.to(dtype).contiguous()
