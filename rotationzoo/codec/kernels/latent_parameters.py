"""What the kernels of latents.cu take, as in `parameters`."""

from typing import NamedTuple

from rotationzoo.codec.kernels.parameters import (
    Begin,
    Blocks,
    Elements,
    Floats,
    Halves,
    Ints,
    Pages,
    Pairs,
    Pieces,
)


class CopiedPages(NamedTuple):
    """The pages of copies that a window reads, and which of their tokens."""

    slots: Ints
    starts: Ints | None
    lengths: Ints
    pieces: int


class ScaleQueries(NamedTuple):
    """`scale_queries` of latents.cu."""

    query: Elements
    given: Elements
    sums: Floats
    scale: float
    blocks: Blocks
    turned: Halves
    headers: Floats


class PackedCodes(NamedTuple):
    """Rows of codes in pages."""

    middles: Floats
    levels: Floats | None
    row_bytes: int
    row_stride: int
    begin: Begin
    rope: int


class AttendLatents(NamedTuple):
    """`attend_latents` of latents.cu, and `attend_many_heads` of many_heads.cu."""

    query: Elements
    turned: Halves
    headers: Floats
    columns: int
    heads: int
    pages: Pages
    pieces: Pieces
    codes: PackedCodes
    blocks: Blocks
    floors: Ints
    copies: Elements
    sink: CopiedPages
    recent: CopiedPages
    scale: float
    totals: Pairs
    outputs: Elements


class MergeLatents(NamedTuple):
    """`merge_latents` of latents.cu."""

    totals: Pairs
    outputs: Elements
    blocks: Blocks
    packed: Elements
    exact: Elements
