"""Attention over pages of latents (MLA) on an NVIDIA GPU, as `codec.attention` defines it: what the
kernels of `latents.cu` read, and how their work is cut up."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from rotationzoo.codec.attention import ExactWindow, PackedSide, PackedTokens
from rotationzoo.codec.cuda import TYPES, Launcher, allow_shared, build
from rotationzoo.codec.cuda_attention import choose_splits
from rotationzoo.codec.kernels import AttendLatents, Begin, CopiedPages, MergeLatents, Pages
from rotationzoo.codec.page_layout import PageLayout
from rotationzoo.codec.transform import SegmentLayout

_PAGE = 64  # tokens: `TILE` in the source
_LARGEST = 2.0**14
"""Of a query that is rounded to float16."""
_LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class LatentVariant:
    """The layout, type and columns that the kernels are compiled for."""

    layout: PageLayout
    rope: int
    """Channels of the exact key."""
    dtype: torch.dtype
    """Of queries and exact rows."""
    columns: int
    """That a block handles: query heads times query tokens, or a part of them."""

    def macros(self) -> tuple[tuple[str, str], ...]:
        """The macros that compile the source into this variant."""
        format = self.layout.format
        values = {
            "RANK": self.layout.dim,
            "ROPE": self.rope,
            "COLUMNS": self.columns,
            "TYPE": TYPES[self.dtype],
            "HALF": format.metadata == "float16",
            "MINIMUM": format.offset == "minimum",
            "STRIDED": format.packing == "strided",
        }
        return tuple((name, str(int(value))) for name, value in values.items())

    @property
    def threads(self) -> int:
        """Of a block of `attend_latents`."""
        return self.layout.dim // 2

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: `SHARED` in the source."""
        rank, padded = self.layout.dim, 2 * (self.layout.dim + self.rope) + 16
        numbers = 2 * _PAGE * self.layout.format.metadata_bits // 8
        stage = _PAGE * (rank // 4 + 32 + 2 * self.rope + 16) + numbers
        ring = max(3 * stage, _PAGE * padded)
        sets, warps = self.columns // 8, rank // 64
        down = warps // min(sets, warps // 2)
        weights = _PAGE // 2 * (self.columns + 8) * 4
        return ring + self.columns * padded + weights + (2 * down + 1) * self.columns * 4


def supports(layout: PageLayout | SegmentLayout, rope: int, dtype: torch.dtype) -> bool:
    """Whether the kernels read pages of this layout with queries of this type."""
    return (
        isinstance(layout, PageLayout)
        and (layout.heads, layout.groups, layout.tokens) == (1, 1, _PAGE)
        and layout.dim in (256, 512)
        and rope % 16 == 0
        and 0 < rope <= 64
        and dtype in (torch.float16, torch.bfloat16)
    )


def choose_columns(columns: int) -> int:
    """How many of a request's columns one block handles."""
    return 16 if columns <= 16 else 32 if columns <= 32 else 64


@dataclass(frozen=True)
class Frame:
    """What takes queries to the frame of the codes, and back what they read there."""

    to_codes: torch.Tensor
    """`[R, R]`, in the type of queries: its columns are in the order of a row's fields, and divided
    by what a field counts."""
    sums: torch.Tensor
    """float32 `[R, 2]`: a query's sum in the frame of the codes, and its product with the mean."""
    from_codes: torch.Tensor
    """`[R, R]`."""
    mean: torch.Tensor | None
    """`[R]`."""

    @classmethod
    def of(cls, side: PackedSide, dtype: torch.dtype) -> "Frame":
        """The frame of a layer's packed latents."""
        matrix = side.matrix[0]
        turned = matrix.T  # with row = stored @ matrix, query . row = (query @ matrix.T) . stored
        channels, powers = _list_fields(side.layout.dim, side.layout.format.packing)
        ordered = turned[:, channels.to(matrix.device)] / powers.to(matrix.device)
        mean = None if side.mean is None else side.mean[0]
        bias = torch.zeros_like(turned[:, 0]) if mean is None else mean
        sums = torch.stack([turned.sum(1), bias], 1).float()
        mean = mean if mean is None else mean.to(dtype)
        return cls(ordered.to(dtype), sums, matrix.to(dtype).contiguous(), mean)


def _list_fields(dim: int, packing: str) -> tuple[torch.Tensor, torch.Tensor]:
    """For each number of a query, in the order in which tensor cores multiply them: the channel of
    its code, and what the code's field counts. A product takes two pairs of each of four lanes;
    a lane has a field of two bytes of a word, and then of the other two."""
    number = torch.arange(dim)
    step, inside = number // 16, number % 16
    four, field = step // 16, step % 4
    word = 16 * four + 4 * (inside % 8 // 2) + step % 16 // 4
    byte = inside % 2 * 2 + inside // 8
    channel = 16 * word + 4 * byte + field
    if packing == "strided":
        channel = field * (dim // 4) + 4 * word + byte
    return channel, 4.0**field


@dataclass(frozen=True)
class Kernels:
    """The compiled kernels, and how many blocks of the first a GPU holds at once."""

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
    occupancy = attend.occupancy.max_active_blocks_per_multiprocessor(variant.threads, shared)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return Kernels(attend, code.get_kernel("merge_latents"), occupancy * processors)


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
    assert isinstance(layout, PageLayout)
    rank, columns = layout.dim, tokens * heads
    variant = LatentVariant(layout, key - rank, query.dtype, choose_columns(columns))
    if not query.numel():  # CUDA refuses an empty grid
        return
    kernels = compiled(variant, query.device)
    tiles = -(-columns // variant.columns)
    copied = [_copied(window) for window in windows]
    exact = sum(each.pieces for each in copied)
    room = len(packed.key.blocks)
    splits = choose_splits(kernels.blocks, batch * tiles, exact, room * layout.tokens)
    splits = max(1, min(splits, room))
    parts = exact + splits

    latents = query[..., :rank].reshape(-1, rank)
    turned = (latents @ frame.to_codes).float()
    unit = turned.abs().amax(-1, keepdim=True).clamp(min=1e-30) / _LARGEST
    scaled = scale * _LOG2E
    headers = torch.cat([unit * 2.0**24, latents.float() @ frame.sums], 1) * scaled
    turned = (turned / unit).half()
    table = packed.key.addresses().contiguous()
    pages = Pages(table, packed.key.base, packed.key.unit, table.shape[1])
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
        begin=Begin(*layout.starts[1:3]),
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
    launch = Launcher(query.device)
    grid, shared = (parts, tiles, batch), variant.shared_bytes
    launch(kernels.attend, grid, variant.threads, arguments, early=False, shared=shared)

    of_codes, of_copies = query.new_empty(2, batch * columns, rank)
    shares = headers.new_empty(batch * columns)
    merge = MergeLatents(totals, outputs, parts, exact, of_codes, of_copies, shares)
    launch(kernels.merge, (columns, batch, 1), rank // 4, merge, early=False)
    rows = output.view(-1, rank)
    torch.addmm(of_copies, of_codes, frame.from_codes, out=rows)
    if frame.mean is not None:
        rows.addcmul_(shares[:, None].to(rows.dtype), frame.mean)


def _copied(window: ExactWindow) -> CopiedPages:
    slots, lengths, starts = window.slots, window.lengths, window.starts
    assert slots is not None
    assert lengths is not None
    if starts is None:
        starts = torch.zeros_like(lengths)
    return CopiedPages(slots, starts, lengths, slots.shape[1])
