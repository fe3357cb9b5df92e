"""The kernels of `attention.cu` and `attention_parts.cu`: what they read, how they are compiled,
and how their work is cut up."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from rotationzoo.codec.cuda import ATTENTION_SOURCES, TYPES
from rotationzoo.codec.cuda_launch import build
from rotationzoo.codec.pages import PageLayout

_LARGEST_DIM, _MOST_GROUPS, _TILE = 256, 8, 32
PREPARE_THREADS, FINISH_THREADS = 1024, 512
MOST_TOTALS = 1024  # of columns and parts in a block of `finish`, as in the source
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
            numbers = 2 * layout.groups * _TILE // layout.tokens_per_scale
            metadata = numbers * layout.format.metadata_bits // 8
            bytes_of_a_tile += _TILE * layout.dim // 4 + metadata
        return 4 if 8 * bytes_of_a_tile <= _SHARED_MEMORY else 2

    @property
    def window(self) -> int:
        """Exact tokens that a block of `attend` reads: four threads compare each. `WINDOW` in the
        source."""
        return 32 * self.warps // 4

    @property
    def key_group(self) -> int:
        """Channels of a key whose products are summed before a scale multiplies them: all, where
        channels have scales of their own, which multiply the query instead."""
        key = self.key
        return key.dim // key.groups if key.tokens_per_scale == 1 else key.dim

    @property
    def column_bytes(self) -> int:
        """Bytes of a query that `prepare` writes: two of each channel, or float32 where `attend`
        rounds them for every tile. `COLUMN` in the source."""
        return -(-self.key.dim // 64) * 64 * (2 if self.key.tokens_per_scale == 1 else 4)

    @property
    def source(self) -> str:
        """The program that has the kernels."""
        return "".join(path.read_text() for path in ATTENTION_SOURCES)

    def macros(self) -> tuple[tuple[str, str], ...]:
        """The macros that compile the source into this variant."""
        format = self.key.format
        values = {
            "KEY_DIM": self.key.dim,
            "VALUE_DIM": self.value.dim,
            "KEY_GROUP": self.key_group,
            "VALUE_GROUP": self.value.dim // self.value.groups,
            "KEY_TOKENS": self.key.tokens_per_scale,
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


def supports(key: PageLayout, value: PageLayout, dtype: torch.dtype, exact_tokens: int = 0) -> bool:
    """Whether the kernels read pages of these layouts with queries of this type, and windows that
    have room for so many exact tokens together."""
    # Windows are cut into parts one by one, and packed tokens are at least one more.
    parts = exact_tokens // Variant(key, value, dtype, soft_cap=False, columns=4).window + 3
    return (
        parts <= MOST_TOTALS
        and dtype in TYPES
        and (key.format, key.tokens, key.heads) == (value.format, value.tokens, value.heads)
        and key.tokens % _TILE == 0
        and all(layout.dim % 16 == 0 and layout.dim <= _LARGEST_DIM for layout in (key, value))
        and (_has_channel_scales(key) or _has_row_scales(key))
        and _has_row_scales(value)
    )


def _has_row_scales(layout: PageLayout) -> bool:
    """Whether each token has scales of its own, as few as the kernels can keep apart."""
    group = layout.dim // layout.groups
    # Codes that share a 32-bit word and a field of its bytes must share a scale.
    run = 4 if layout.format.packing == "strided" else 16
    return layout.tokens_per_scale == 1 and layout.groups <= _MOST_GROUPS and group % run == 0


def _has_channel_scales(layout: PageLayout) -> bool:
    """Whether the tokens of a tile share a scale of each channel, in the format of `cache.kivi`."""
    format = layout.format
    kind = format.metadata, format.offset, format.packing
    return (
        layout.tokens_per_scale == _TILE
        and layout.groups == layout.dim
        and kind == ("float16", "minimum", "consecutive")
    )


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


@cache
def compiled(variant: Variant, device: torch.device) -> Kernels:
    """The kernels of a variant, compiled for this GPU or taken from the cache. Raises
    `RotationZooError` where cuda.core or NVRTC is missing."""
    code = build(variant.source, variant.macros(), device)
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
