"""Attention over pages of latents (MLA) on an NVIDIA GPU, as `codec.attention` defines it: what the
kernels of `latents.cu` read, and how their work is cut up."""

from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import torch

from rotationzoo.codec.attention import ExactWindow, PackedSide, PackedTokens
from rotationzoo.codec.cuda import TYPES, Launcher, allow_shared, build, shared_memory
from rotationzoo.codec.cuda_attention import choose_windows
from rotationzoo.codec.formats import SEGMENTS
from rotationzoo.codec.kernels.latent_parameters import (
    AttendLatents,
    CopiedPages,
    MergeLatents,
    PackedCodes,
    ScaleQueries,
)
from rotationzoo.codec.kernels.parameters import Begin, Blocks, Pages
from rotationzoo.codec.latent_rows import (
    Layout,
    code_bytes,
    count_pieces,
    list_pieces,
    middles_of,
    order_bytes,
    order_unpacked,
    piece_table,
    round_up,
    row_stride,
    unpack_table,
)
from rotationzoo.codec.page_layout import PageLayout
from rotationzoo.codec.transform import SegmentLayout, list_scales

_PAGE = 64  # tokens: `TILE` in the source
_SHORTEST_SPLIT, _SHORTEST_OF_WAVES = 2 * _PAGE, 1024  # tokens
_SMALLEST_WAVE, _WAVES_OF_FEW = 6, 3  # blocks of a request, and waves where there are fewer
_LONG_SPLIT = 2048  # tokens of a split beside which exact ones take little time
_MOST_PIECES = 3 / 8  # of a channel: more take more registers than there are
_EXTRA = 8  # numbers of a row of codes behind its channels: `EXTRA` in the source
MANY_HEADS = True
"""Whether `many_heads.cu` is used."""
_WAVES = 4  # of blocks of `attend_many_heads`, at most
_STARTING = 4  # pages that a block could read while it starts and ends
_MANY_WARPS = 16  # of a block of `attend_many_heads`: `THREADS` in the source
_FEWEST_COPIED = 3  # pages of copies that are worth such a block
_MERGING = 8  # warps of `merge_latents`, and parts that one adds, before there are more warps


@dataclass(frozen=True)
class LatentVariant:
    """The layout, type and columns that the kernels are compiled for."""

    layout: Layout
    rope: int
    """Channels of the exact key."""
    dtype: torch.dtype
    """Of queries and exact rows."""
    columns: int
    """That a block handles: query heads times query tokens, or a part of them."""
    has_many: bool = False
    """Whether `many_heads.cu` reads the codes."""

    def macros(self) -> tuple[tuple[str, str], ...]:
        """The macros that compile the source into this variant."""
        segments = isinstance(self.layout, SegmentLayout)
        format = SEGMENTS if isinstance(self.layout, SegmentLayout) else self.layout.format
        values = {
            "RANK": self.layout.dim,
            "ROPE": self.rope,
            # With many heads, no kernel of `latents.cu` that is launched depends on them.
            "COLUMNS": 16 if self.has_many else self.columns,
            "TYPE": TYPES[self.dtype],
            "PIECES": self.pieces,
            "ROOM": self.room,
            "HALF": format.metadata == "float16",
            "MINIMUM": format.offset == "minimum",
            "SEGMENTS": segments,
        }
        return tuple((name, str(int(value))) for name, value in values.items())

    def many_macros(self) -> tuple[tuple[str, str], ...]:
        """Those of `many_heads.cu`."""
        return tuple(each for each in self.macros() if each[0] not in ("COLUMNS", "PIECES"))

    @property
    def warps(self) -> int:
        """Warps of a block that attends."""
        return _MANY_WARPS if self.has_many else self.layout.dim // 64 * self.columns // 16

    @property
    def pieces(self) -> int:
        """`PIECES` in the source. With many heads, a turned query has only its channels."""
        return self.layout.dim // 4 if self.has_many else count_pieces(self.layout)

    @property
    def room(self) -> int:
        """`ROOM` in the source: few sizes are few variants."""
        return round_up(row_stride(self.layout), 16)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: `SHARED` in the source."""
        if self.has_many:
            return many_bytes(self.layout)
        padded, exact = 2 * (self.layout.dim + self.rope) + 16, 2 * self.rope + 16
        stage = _PAGE * (self.room + exact)
        if isinstance(self.layout, PageLayout):
            stage += 2 * _PAGE * self.layout.format.metadata_bits // 8
        row = 4 * (self.columns + 8)
        parts = 16 * self.warps // self.columns
        of_codes = 2 * stage + parts * _PAGE * row + self.columns * exact
        ring = max(of_codes, (_PAGE + self.columns) * padded)
        down = self.warps // min(self.columns // 8, self.warps // 2)
        return ring + _PAGE // 2 * row + (2 * down + 1) * self.columns * 4 + 16 * self.pieces


def supports(layout: Layout, rope: int, dtype: torch.dtype) -> bool:
    """Whether the kernels read pages of this layout with queries of this type."""
    has_one = layout.heads == 1 and layout.tokens == _PAGE
    if isinstance(layout, PageLayout):
        has_one = has_one and layout.groups == 1
    return (
        has_one
        and layout.dim in (128, 256, 512)
        and rope % 16 == 0
        and 0 < rope <= 64
        and dtype in (torch.float16, torch.bfloat16)
        and len(list_pieces(layout)) <= _MOST_PIECES * layout.dim
    )


def choose_variant(
    columns: int, layout: Layout, rope: int, dtype: torch.dtype, device: torch.device
) -> LatentVariant:
    """What reads so many of a request's columns fastest on a GPU."""
    variant = LatentVariant(layout, rope, dtype, choose_columns(columns, layout))
    most = shared_memory(device)
    takes = MANY_HEADS and (layout.dim, rope) == (512, 64) and many_bytes(layout) <= most
    if takes and columns > 16 and _is_hopper(device):
        return replace(variant, has_many=True, columns=_PAGE)
    return variant if variant.shared_bytes <= most else replace(variant, columns=16)


@cache
def _is_hopper(device: torch.device) -> bool:
    """Whether this has the instructions of `many_heads.cu`, as a CPU has that runs its source."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) == (9, 0)


def many_bytes(layout: Layout) -> int:
    """Shared memory of a block of `many_heads.cu`: `SHARED` in the source."""
    block = _PAGE * 128
    stages = 2 * (layout.dim // 64 + 1) * block
    sums = 2 * 4 * _PAGE * 4 + 2 * _PAGE * 4 + 2 * _PAGE * 8
    return layout.dim // 64 * block + stages + _PAGE * round_up(row_stride(layout), 16) + sums


def choose_columns(columns: int, layout: Layout) -> int:
    """How many of a request's columns one block handles."""
    # What a warp has of more columns and pieces does not fit into its registers.
    has_few = 4 * len(list_pieces(layout)) <= layout.dim
    return 32 if columns > 16 and has_few else 16


@dataclass(frozen=True)
class Frame:
    """What takes queries to the frame of the codes, and back what they read there."""

    variant: LatentVariant
    """What reads them."""
    to_codes: torch.Tensor
    """`[R, 4 pieces]`, in the type of queries: for each byte of each piece, in the order in which
    tensor cores multiply them, the channel of the codes times what the byte counts. With many
    heads, `[R, R]`: channels are in the order in which they are unpacked, as all else is."""
    sums: torch.Tensor
    """float32 `[R, 2]`: a query's product with the middles in the frame of the codes, and with the
    mean in its own."""
    middles: torch.Tensor
    """float32 `[R]`: what a channel of the codes has of a row's offset."""
    from_codes: torch.Tensor
    """`[R + 8, R]`: behind the channels of the codes, what all weights of packed tokens add."""

    @classmethod
    def of(cls, side: PackedSide, variant: LatentVariant) -> "Frame":
        """The frame of a layer's packed latents."""
        layout, matrix = side.layout, side.matrix[0]
        turned = matrix.T  # with row = stored @ matrix, query . row = (query @ matrix.T) . stored
        middles = middles_of(layout, matrix.device)
        mean = torch.zeros_like(matrix[0]) if side.mean is None else side.mean[0]
        sums = torch.stack([turned @ middles, mean], 1).float()
        if variant.has_many:
            order = order_unpacked(layout, matrix.device)
            ordered, matrix, middles = turned[:, order], matrix[order], middles[order]
        else:
            channels, counts = order_bytes(layout)
            ordered = turned[:, channels.to(matrix.device)] * counts.to(matrix.device)
        back = torch.cat([matrix, mean[None], matrix.new_zeros(_EXTRA - 1, layout.dim)])
        return cls(variant, ordered.to(variant.dtype), sums, middles, back.to(variant.dtype))


@dataclass(frozen=True)
class Kernels:
    """The compiled kernels, and how many blocks of what attends a GPU holds at once."""

    scale: Any
    attend: Any
    merge: Any
    blocks: int


@cache
def compiled(variant: LatentVariant, device: torch.device) -> Kernels:
    """The kernels of a variant, compiled for this GPU or taken from the cache. Raises
    `RotationZooError` where cuda.core or NVRTC is missing."""
    code = build("latents.cu", variant.macros(), device)
    attend, shared = code.get_kernel("attend_latents"), variant.shared_bytes
    if variant.has_many:
        many = build("many_heads.cu", variant.many_macros(), device, "a")
        attend = many.get_kernel("attend_many_heads")
    allow_shared(attend, shared, device)
    occupancy = attend.occupancy.max_active_blocks_per_multiprocessor(32 * variant.warps, shared)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    scale, merge = code.get_kernel("scale_queries"), code.get_kernel("merge_latents")
    return Kernels(scale, attend, merge, occupancy * processors)


def attend(
    query: torch.Tensor,
    packed: PackedTokens,
    windows: tuple[ExactWindow, ExactWindow],
    frame: Frame,
    scale: float,
    output: torch.Tensor,
) -> None:
    """Write what the queries `[B, T, H, R + rope channels]` of T new tokens read of latents to
    `output` `[B, T, H, R]`, both contiguous, with the arguments of `attention.attend`. In a page,
    exact keys follow the codes. Both windows are in slots of one pool, whose values are the first
    channels of its keys. Nothing waits for the GPU."""
    batch, tokens, heads, key = query.shape
    layout = packed.key.layout
    rank, columns = layout.dim, tokens * heads
    if not query.numel():  # CUDA refuses an empty grid
        return
    variant = frame.variant
    kernels = compiled(variant, query.device)
    tiles = -(-columns // variant.columns)
    sink, recent = (_copied(window) for window in windows)
    copied, room = sink.pieces + recent.pieces, len(packed.key.blocks)
    if variant.has_many:
        splits, exact = choose_many_splits(kernels.blocks, batch * tiles, room, copied)
    else:
        exact = choose_windows(kernels.blocks, batch * tiles, copied)
        splits = choose_splits(kernels.blocks, batch * tiles, room * layout.tokens, exact)
    floors = packed.lengths if packed.floors is None else packed.floors
    shares = Blocks.share(packed.starts, packed.lengths, exact, splits, room)

    launch = Launcher(query.device)
    given = query.view(-1, key)[:, :rank] @ frame.to_codes
    turned = torch.empty_like(given, dtype=torch.float16)
    headers = torch.empty(len(given), 3, device=query.device)
    scaled = ScaleQueries(query, given, frame.sums, scale, shares, turned, headers)
    launch(kernels.scale, (len(given) + (batch > 1), 1, 1), 128, scaled)
    table = packed.key.addresses().contiguous()
    pages = Pages(table, packed.key.base, packed.key.unit, table.shape[1])
    begin = Begin(*layout.starts[1:3]) if isinstance(layout, PageLayout) else None
    codes = PackedCodes(
        middles=frame.middles,
        levels=None if begin else list_scales(query.device),
        row_bytes=code_bytes(layout),
        row_stride=row_stride(layout),
        begin=begin or Begin(0, 0),
        rope=layout.bytes,
    )
    totals = headers.new_empty(shares.total, columns, 2)
    outputs = query.new_empty(shares.total, columns, rank)
    list_codes = unpack_table if variant.has_many else piece_table
    arguments = AttendLatents(
        query, turned, headers, columns, heads, pages, list_codes(layout, query.device), codes,
        shares, floors, windows[0].key, sink, recent, scale, totals, outputs,
    )  # fmt: skip
    grid, shared = (shares.total, tiles, 1), variant.shared_bytes
    launch(kernels.attend, grid, 32 * variant.warps, arguments, shared=shared)

    result = output.view(-1, rank)
    of_codes = query.new_empty(len(result), rank + _EXTRA)
    merge = MergeLatents(totals, outputs, shares, of_codes, result)
    warps = min(_MERGING, -(-(exact + shares.splits) // _MERGING))
    launch(kernels.merge, (columns, batch, rank // 128), 32 * warps, merge)
    result.addmm_(of_codes, frame.from_codes)


def choose_splits(blocks: int, tiles: int, tokens: int, exact: int) -> int:
    """How many splits `tokens` packed tokens get, of each of so many tiles of columns. A GPU holds
    `blocks` blocks at once, of which exact tokens take `exact`."""
    # Whole waves, as heads have them, would take up to 14 % longer here.
    wave, shortest = blocks // tiles, _SHORTEST_SPLIT
    if wave < _SMALLEST_WAVE:  # several: with one, parts of the GPU would wait for the last blocks
        most, shortest = -(-_WAVES_OF_FEW * blocks // tiles), _SHORTEST_OF_WAVES
    elif tokens // wave < _LONG_SPLIT:
        most = max(1, wave - exact)
    else:
        most = wave
    return max(1, min(most, tokens // shortest))


@cache
def choose_many_splits(blocks: int, tiles: int, pages: int, copied: int) -> tuple[int, int]:
    """How many splits `pages` pages get, and how many `copied` ones of exact tokens, which come
    last, of each of so many tiles of columns. A GPU holds `blocks` blocks at once, each of which
    takes the time of `_STARTING` pages to start and end."""
    most = max(1, min(pages, _WAVES * blocks // tiles))
    most_exact = -(-copied // _FEWEST_COPIED)

    def time(numbers: tuple[int, int]) -> tuple[int, int]:
        splits, exact = numbers
        each, later = -(-pages // splits) + _STARTING, -(-copied // max(1, exact)) + _STARTING
        count, others = tiles * splits, tiles * exact
        waves = -(-count // blocks)
        free = waves * blocks - count  # of the last wave
        if not others or (free and -(-others // free) * later <= each):
            return waves * each, -exact
        return max(waves * each, (count * each + others * later) // blocks + later), -exact

    return min(product(range(1, most + 1), range(min(1, copied), most_exact + 1)), key=time)


def _copied(window: ExactWindow) -> CopiedPages:
    slots, lengths = window.slots, window.lengths
    assert slots is not None
    assert lengths is not None
    return CopiedPages(slots, window.starts, lengths, slots.shape[1])
