"""Attention over pages of latents (MLA) on an NVIDIA GPU, as `codec.attention` defines it: what the
kernels of `latents.cu` read, and how their work is cut up."""

from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import torch

from rotationzoo.codec.attention import ExactWindow, PackedSide, PackedTokens
from rotationzoo.codec.cuda import TYPES, Launcher, allow_shared, build, shared_memory
from rotationzoo.codec.cuda_attention import choose_splits
from rotationzoo.codec.formats import SEGMENTS
from rotationzoo.codec.kernels.latent_parameters import (
    AttendLatents,
    CopiedPages,
    MergeLatents,
    ScaleQueries,
)
from rotationzoo.codec.kernels.parameters import Begin, Pages
from rotationzoo.codec.page_layout import PageLayout
from rotationzoo.codec.slots import cut_codes
from rotationzoo.codec.transform import SegmentLayout, list_scales
from rotationzoo.linalg.transform_coding import SEGMENT

_PAGE = 64  # tokens: `TILE` in the source
_SHORTEST_SPLIT = 2 * _PAGE  # tokens
_MOST_PIECES = 3 / 8  # of a channel: more take more registers than there are
_EXTRA = 8  # numbers of a row of codes behind its channels: `EXTRA` in the source
_MERGING = 256  # threads of `merge_latents`, each for four of 128 channels
Layout = PageLayout | SegmentLayout


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

    def macros(self) -> tuple[tuple[str, str], ...]:
        """The macros that compile the source into this variant."""
        segments = isinstance(self.layout, SegmentLayout)
        format = SEGMENTS if isinstance(self.layout, SegmentLayout) else self.layout.format
        values = {
            "RANK": self.layout.dim,
            "ROPE": self.rope,
            "COLUMNS": self.columns,
            "TYPE": TYPES[self.dtype],
            "PIECES": self.pieces,
            "ROOM": self.room,
            "HALF": format.metadata == "float16",
            "MINIMUM": format.offset == "minimum",
            "SEGMENTS": segments,
        }
        return tuple((name, str(int(value))) for name, value in values.items())

    @property
    def warps(self) -> int:
        """Warps of a block of `attend_latents`."""
        return self.layout.dim // 64 * self.columns // 16

    @property
    def pieces(self) -> int:
        """`PIECES` in the source."""
        return _count_pieces(self.layout)

    @property
    def room(self) -> int:
        """`ROOM` in the source: few sizes are few variants."""
        return _round_up(_row_stride(self.layout), 16)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: `SHARED` in the source."""
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


def choose_columns(columns: int, layout: Layout) -> int:
    """How many of a request's columns one block handles."""
    # What a warp has of more columns and pieces does not fit into its registers.
    has_few = 4 * len(list_pieces(layout)) <= layout.dim
    return 32 if columns > 16 and has_few else 16


@cache
def list_pieces(layout: Layout) -> list[tuple[int, int, int, int, int]]:
    """Where the codes of a row lie: the word, the mask of each of its bytes, the channel of the
    first byte, how many channels later that of the next one is, and the power of two that a masked
    byte counts in its code."""
    if isinstance(layout, SegmentLayout):
        return [(*piece[:3], 1, piece[3]) for piece in cut_codes(layout.widths[0])]
    pieces = []
    for word, field in product(range(layout.dim // 16), range(4)):
        mask, power = 3 << 2 * field, -2 * field
        if layout.format.packing == "strided":
            pieces.append((word, mask, field * layout.dim // 4 + 4 * word, 1, power))
        else:
            pieces.append((word, mask, 16 * word + field, 4, power))
    return pieces


def _count_pieces(layout: Layout) -> int:
    """Pieces of a row with those of padding, so that the most warps have equally many eights."""
    return max(layout.dim // 4, _round_up(len(list_pieces(layout)), layout.dim // 8))


@cache
def _piece_table(layout: Layout, count: int, device: torch.device) -> torch.Tensor:
    """`Piece` in the source for each, int32 `[count, 4]`."""
    table, seen = torch.zeros(count, 4, dtype=torch.int32), set()
    for at, (word, mask, channel, step, power) in enumerate(list_pieces(layout)):
        place = channel | (channel in seen) << 12 | step << 16
        table[at] = torch.tensor([4 * word, mask * 0x10001, place, power])
        seen.add(channel)
    return table.to(device)


@cache
def _middles(layout: Layout, device: torch.device) -> torch.Tensor:
    """What a channel has of a row's offset, float32 `[R]`."""
    if isinstance(layout, PageLayout):
        return torch.ones(layout.dim, device=device)
    widths = torch.tensor(layout.widths[0], device=device).repeat_interleave(SEGMENT)
    return 0.5 - 2.0**widths / 2


def _row_stride(layout: Layout) -> int:
    """Bytes from one row of codes to the next in shared memory: rows that are read at once lie in
    other banks. Rows that are no multiples of 16 are copied as they lie in a page."""
    size = _code_bytes(layout)
    return size + 16 if size % 32 == 0 and size else size


def _code_bytes(layout: Layout) -> int:
    return layout.dim // 4 if isinstance(layout, PageLayout) else layout.row_bytes[0]


def _round_up(number: int, of: int) -> int:
    return max(of, -(-number // of) * of)


@dataclass(frozen=True)
class Frame:
    """What takes queries to the frame of the codes, and back what they read there."""

    to_codes: torch.Tensor
    """`[R, 4 pieces]`, in the type of queries: for each byte of each piece, in the order in which
    tensor cores multiply them, the channel of the codes times what the byte counts."""
    sums: torch.Tensor
    """float32 `[R, 2]`: a query's product with the middles in the frame of the codes, and with the
    mean in its own."""
    from_codes: torch.Tensor
    """`[R + 8, R]`: behind the channels of the codes, what all weights of packed tokens add."""

    @classmethod
    def of(cls, side: PackedSide, dtype: torch.dtype) -> "Frame":
        """The frame of a layer's packed latents."""
        layout, matrix = side.layout, side.matrix[0]
        turned = matrix.T  # with row = stored @ matrix, query . row = (query @ matrix.T) . stored
        channels, counts = _order_bytes(layout)
        ordered = turned[:, channels.to(matrix.device)] * counts.to(matrix.device)
        mean = torch.zeros_like(matrix[0]) if side.mean is None else side.mean[0]
        sums = torch.stack([turned @ _middles(layout, matrix.device), mean], 1).float()
        back = torch.cat([matrix, mean[None], matrix.new_zeros(_EXTRA - 1, layout.dim)])
        return cls(ordered.to(dtype), sums, back.to(dtype))


def _order_bytes(layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """For each number of a turned query: its channel, and what the byte counts in the code. A
    product takes two pairs of numbers of each of four lanes: bytes 0 and 2 of the lane's piece, and
    bytes 1 and 3."""
    pieces = list_pieces(layout)
    count = 4 * _count_pieces(layout)
    channels, counts = torch.zeros(count, dtype=torch.int64), torch.zeros(count)
    for number in range(count):
        step, inside = divmod(number, 16)
        piece = 4 * step + inside % 8 // 2
        if piece < len(pieces):
            _, _, channel, apart, power = pieces[piece]
            byte = inside % 2 * 2 + inside // 8
            channels[number], counts[number] = channel + byte * apart, 2.0**power
    return channels, counts


@dataclass(frozen=True)
class Kernels:
    """The compiled kernels, and how many blocks of `attend_latents` a GPU holds at once."""

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
    width = choose_columns(columns, layout)
    variant = LatentVariant(layout, key - rank, query.dtype, width)
    if variant.shared_bytes > shared_memory(query.device):
        variant = replace(variant, columns=16)
    if not query.numel():  # CUDA refuses an empty grid
        return
    kernels = compiled(variant, query.device)
    tiles = -(-columns // variant.columns)
    copied = [_copied(window) for window in windows]
    exact = sum(each.pieces for each in copied)
    room = len(packed.key.blocks)
    tokens = room * layout.tokens
    splits = choose_splits(kernels.blocks, batch * tiles, exact, tokens, _SHORTEST_SPLIT)
    splits = max(1, min(splits, room))
    parts = exact + splits

    launch = Launcher(query.device)
    given = query.view(-1, key)[:, :rank] @ frame.to_codes
    turned = torch.empty_like(given, dtype=torch.float16)
    headers = torch.empty(len(given), 3, device=query.device)
    scaled = ScaleQueries(query, given, frame.sums, scale, turned, headers)
    launch(kernels.scale, (len(given), 1, 1), 128, scaled, early=False)
    table = packed.key.addresses().contiguous()
    pages = Pages(table, packed.key.base, packed.key.unit, table.shape[1])
    begin = Begin(*layout.starts[1:3]) if isinstance(layout, PageLayout) else None
    lengths = packed.lengths
    starts = torch.zeros_like(lengths) if packed.starts is None else packed.starts
    floors = lengths if packed.floors is None else packed.floors
    totals = headers.new_empty(batch, columns, parts, 2)
    outputs = headers.new_empty(batch, columns, parts, rank)
    arguments = AttendLatents(
        query=query,
        turned=turned,
        headers=headers,
        columns=columns,
        heads=heads,
        pages=pages,
        pieces=_piece_table(layout, variant.pieces, query.device),
        middles=_middles(layout, query.device),
        levels=None if begin else list_scales(query.device),
        row_bytes=_code_bytes(layout),
        row_stride=_row_stride(layout),
        begin=begin or Begin(0, 0),
        rope=layout.bytes,
        starts=starts,
        floors=floors,
        lengths=lengths,
        splits=splits,
        copies=windows[0].key,
        sink=copied[0],
        recent=copied[1],
        scale=scale,
        totals=totals,
        outputs=outputs,
    )
    grid, shared = (parts, tiles, batch), variant.shared_bytes
    launch(kernels.attend, grid, 32 * variant.warps, arguments, early=False, shared=shared)

    of_copies = query.new_empty(batch * columns, rank)
    of_codes = query.new_empty(batch * columns, rank + _EXTRA)
    merge = MergeLatents(totals, outputs, parts, exact, of_codes, of_copies)
    launch(kernels.merge, (columns, batch, rank // 128), _MERGING, merge, early=False)
    torch.addmm(of_copies, of_codes, frame.from_codes, out=output.view(-1, rank))


def _copied(window: ExactWindow) -> CopiedPages:
    slots, lengths, starts = window.slots, window.lengths, window.starts
    assert slots is not None
    assert lengths is not None
    if starts is None:
        starts = torch.zeros_like(lengths)
    return CopiedPages(slots, starts, lengths, slots.shape[1])
