"""What kernels take: a tuple for each, whose fields have the names of its parameters. A field of a
group is the parameter `group_field`."""

from typing import Annotated, NamedTuple

import torch

# A tensor, as the pointer to its memory that a kernel takes; None is a null pointer. Sources define
# `Element` and `Metadata` by the types that they are compiled for.
Bytes = Annotated[torch.Tensor, "unsigned char*"]
Ints = Annotated[torch.Tensor, "int*"]
Counts = Annotated[torch.Tensor, "Count*"]
Addresses = Annotated[torch.Tensor, "Address*"]
Floats = Annotated[torch.Tensor, "float*"]
Elements = Annotated[torch.Tensor, "Element*"]
Metadata = Annotated[torch.Tensor, "Metadata*"]
Signed = Annotated[torch.Tensor, "signed char*"]
Headers = Annotated[torch.Tensor, "Header*"]
Pairs = Annotated[torch.Tensor, "float2*"]
Pieces = Annotated[torch.Tensor, "int4*"]
Halves = Annotated[torch.Tensor, "unsigned short*"]
Tally = Annotated[torch.Tensor, "unsigned long long*"]


class Quantize(NamedTuple):
    """`quantize` of int2.cu."""

    rows: Elements
    length: int
    rotation: Floats | None
    ranks: Ints
    weights: Floats
    codes: Bytes
    metadata: Metadata
    refused: Ints
    rotated: Floats | None = None


class Dequantize(NamedTuple):
    """`dequantize` of int2.cu."""

    codes: Bytes
    metadata: Metadata
    length: int
    rotation: Floats | None
    rows: Elements


class Strides(NamedTuple):
    """In elements, of queries or results `[B, H_q, T, D]`."""

    row: int
    head: int
    token: int


class Blocks(NamedTuple):
    """The thread blocks of all requests: `BlocksOf` of blocks.cu."""

    starts: Ints | None
    lengths: Ints
    requests: int
    windows: int
    splits: int
    most: int
    table: Pieces | None

    @classmethod
    def share(
        cls,
        starts: torch.Tensor | None,
        lengths: torch.Tensor,
        windows: int,
        splits: int,
        most: int,
    ) -> "Blocks":
        """With room for what the blocks of several requests share."""
        own, requests = (min(splits, most), most), len(lengths)
        blocks = cls(starts, lengths, requests, windows, *own, None)
        if requests == 1:
            return blocks
        return blocks._replace(table=lengths.new_empty(blocks.packed + requests, 4))

    @property
    def packed(self) -> int:
        """Those for packed tokens: each request rounds its own number up, by less than one."""
        return self.requests * (self.splits + 1) - 1

    @property
    def total(self) -> int:
        """With those for exact tokens."""
        return self.packed + self.requests * self.windows


class Prepare(NamedTuple):
    """`prepare` of attention.cu."""

    query: Elements
    strides: Strides
    columns: int
    tokens: int
    matrix: Floats
    mean: Floats | None
    scale: float
    segments: Ints | None
    blocks: Blocks
    padded: int
    prepared: Signed
    headers: Headers


class Pages(NamedTuple):
    """Pages of keys or values: page n of `table` `[B, pages]` is at `base + n * unit` bytes."""

    table: Addresses
    base: int
    unit: int
    pages: int


class Segments(NamedTuple):
    """`slots.slot_table` of keys and of values, and `transform.list_scales`."""

    key: Ints | None
    value: Ints | None
    scales: Floats | None


class Window(NamedTuple):
    """Exact rows, as `Rows` in attention.cu."""

    key: Elements
    value: Elements
    lengths: Ints | None
    starts: Ints | None
    slots: Ints | None
    room: int
    pieces: int


class Attend(NamedTuple):
    """`attend` of attention.cu."""

    query: Elements
    strides: Strides
    columns: int
    tokens: int
    prepared: Signed
    headers: Headers
    key: Pages
    value: Pages
    segments: Segments
    blocks: Blocks
    floors: Ints | None
    tiles: int
    sink: Window
    recent: Window
    scale: float
    cap: float
    totals: Pairs
    outputs: Floats


class Finish(NamedTuple):
    """`finish` and `finish_many` of attention.cu."""

    totals: Pairs
    outputs: Floats
    blocks: Blocks
    columns: int
    padded: int
    tokens: int
    matrix: Floats
    mean: Floats | None
    sinks: Floats | None
    result: Elements
    strides: Strides


class Plan(NamedTuple):
    """`plan` of server_step.cu. The last fields are those of `Reads` in vllm/segments."""

    table: Ints
    width: int
    lengths: Ints
    counts: Ints
    batch: int
    mapping: Counts
    tokens: int
    decodes: int
    few: int
    recent_pages: int
    slot_of: Counts
    page_of: Counts
    copied_from: Counts
    used: Counts
    forgotten: Counts
    slots: int
    now: int
    pages: Counts
    places: Counts
    new_slots: Counts
    starts: Ints
    floors: Ints
    ends: Ints
    sink_slots: Ints
    sink_lengths: Ints
    recent_slots: Ints
    recent_starts: Ints
    recent_lengths: Ints
    segments: int
    most: int
    contexts: Ints | None = None
    firsts: Ints | None = None
    gaps: Ints | None = None
    new_bounds: Ints | None = None
    exact_bounds: Ints | None = None
    code_bounds: Ints | None = None
    code_firsts: Ints | None = None


class CopiedRows(NamedTuple):
    """Rows of one side, and their copies."""

    rows: Bytes
    stride: int
    copies: Bytes


class CopyRows(NamedTuple):
    """`copy_rows` of store.cu."""

    places: Counts
    slots: Counts
    row_bytes: int
    key: CopiedRows
    value: CopiedRows


class Begin(NamedTuple):
    """Where the scales and offsets of a page begin, in bytes: see `PageLayout.starts`."""

    scales: int
    offsets: int


class Store(NamedTuple):
    """`store` of store.cu."""

    codes: Bytes
    numbers: Bytes
    pages: Counts
    places: Counts
    memory: Bytes
    page_bytes: int
    code_bytes: int
    begin: Begin
    groups: int
    number_bytes: int
    bad: Tally


class StoreExact(NamedTuple):
    """`store_exact` of store.cu."""

    rows: Bytes
    stride: int
    row_bytes: int
    number_bytes: int
    largest: int
    pages: Counts
    places: Counts
    memory: Bytes
    page_bytes: int
    bad: Tally


class Tokens(NamedTuple):
    """`Tokens` of restore.cu."""

    bounds: Ints
    firsts: Ints
    jumps: Ints
    gaps: Ints
    prompts: int
    table: Counts
    stride: int


class RestoredRows(NamedTuple):
    """The pages of one side, and where its rows go."""

    memory: Bytes
    rows: Elements


class RestoreRows(NamedTuple):
    """`restore_rows` of restore.cu."""

    tokens: Tokens
    room: int
    page_bytes: int
    begin: Begin
    key: RestoredRows
    value: RestoredRows


class GatheredRows(NamedTuple):
    """The copies and the new rows of one side, and where its rows go."""

    copies: Elements
    rows: Elements
    stride: int
    into: Elements


class Gather(NamedTuple):
    """`gather` of restore.cu."""

    tokens: Tokens
    room: int
    slot_of: Counts
    contexts: Ints
    news: Ints
    mean: Floats | None
    key: GatheredRows
    value: GatheredRows


class IntoPages(NamedTuple):
    """`Into` of segments.cu."""

    steps: Floats
    places: Ints
    memory: Bytes
    bad: Tally


class StoreSegments(NamedTuple):
    """`store_segments` of segments.cu."""

    channels: Floats
    tokens: int
    few: int
    pages: Counts
    places: Counts
    page_bytes: int
    scales: Floats
    into: IntoPages


class SegmentSide(NamedTuple):
    """`Side` of segments.cu."""

    rows: Elements
    stride: int
    matrix: Floats
    mean: Floats | None
    into: IntoPages


class StoreFewSegments(NamedTuple):
    """`store_few_segments` of segments.cu."""

    pages: Counts
    places: Counts
    page_bytes: int
    scales: Floats
    key: SegmentSide
    value: SegmentSide


class RestoredSegments(NamedTuple):
    """The pages of one side, with the places of its segments, and where its rows go."""

    places: Ints
    memory: Bytes
    rows: Elements


class RestoreSegments(NamedTuple):
    """`restore_segments` of segments.cu."""

    tokens: Tokens
    room: int
    page_bytes: int
    scales: Floats
    key: RestoredSegments
    value: RestoredSegments
