"""Attention over packed keys and values on an NVIDIA GPU: `attention.cu` launched, as
`codec.attention` defines it."""

import torch

from rotationzoo.codec.attention import ExactWindow, PackedSide, PackedTokens, Scores
from rotationzoo.codec.attention_kernels import (
    FINISH_THREADS,
    MOST_TOTALS,
    PREPARE_THREADS,
    Variant,
    choose_columns,
    choose_splits,
    compiled,
    supports,
)
from rotationzoo.codec.cuda_launch import Argument, Launcher
from rotationzoo.errors import RotationZooError

__all__ = ["attend", "supports"]

_MOST_BLOCKS = 65_535  # of a grid in its second and third dimension


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
    each; by default as many as keep the GPU busy. Nothing waits for the GPU. The matrix of the keys
    may be read before the last kernel of the stream has ended, so that kernel must not write it.
    Raises `RotationZooError` for what `supports` says no to, and for more rows, or more KV heads
    times queries, than a grid has blocks for.
    """
    result_type, dtype = query.dtype, query.dtype
    for window in (head, tail):
        for exact_rows in (window.key, window.value):
            dtype = torch.promote_types(dtype, exact_rows.dtype)
    query = query.to(dtype).contiguous()
    layout = packed.key.layout
    batch, query_heads, tokens, _ = query.shape
    columns = query_heads // layout.heads * tokens
    soft_cap = scores.soft_cap is not None
    width = choose_columns(columns, layout, packed.value.layout)
    tiles = -(-columns // width)
    variant = Variant(layout, packed.value.layout, dtype, soft_cap, width)
    _check(variant, (batch, layout.heads * tiles), head, tail)
    result = query.new_empty(batch, query_heads, tokens, variant.value.dim)
    if not result.numel():  # CUDA refuses an empty grid
        return result.to(result_type)
    kernels = compiled(variant, query.device)
    # A block of `finish` keeps a maximum and a sum of every part.
    windows = sum(-(-window.key.shape[2] // variant.window) for window in (head, tail))
    if splits is None:
        room = len(packed.key.blocks) * layout.tokens
        splits = choose_splits(kernels.blocks, batch * layout.heads * tiles, windows, room)
    splits = min(splits, MOST_TOTALS - windows)
    parts, padded = windows + splits, tiles * width

    # All copies are made before the first kernel. Kernels start early: what they read before they
    # wait for the kernel before them must not come from that one.
    transforms = [_transform(side) for side in packed.sides]
    tables = [side.addresses().contiguous() for side in packed.sides]
    lengths = _counts(packed.lengths)
    exact = [*_window(head, dtype), *_window(tail, dtype)]
    sinks = None if scores.sinks is None else scores.sinks.float().contiguous()
    rows = batch, layout.heads, padded
    prepared = query.new_empty(*rows, variant.column_bytes, dtype=torch.int8)
    headers = query.new_empty(*rows, 2 + layout.dim // variant.key_group, dtype=torch.float32)
    totals = headers.new_empty(*rows, parts, 2)
    outputs = headers.new_empty(*rows, parts, variant.value.dim)
    launch = Launcher(query.device)
    scale, cap = float(scores.scale), float(scores.soft_cap or 0)
    turned = query, columns, *transforms[0], scale, prepared, headers
    early = transforms[0][0] is packed.key.matrix  # no copy, which may have only just begun
    launch(kernels.prepare, (layout.heads, tiles, batch), PREPARE_THREADS, turned, early)

    pages = [table.shape[1] for table in tables]
    read: list[Argument] = [query, columns, tokens, prepared, headers, *tables, *pages]
    cut = lengths, splits, tiles
    launch(
        kernels.attend,
        (parts, layout.heads * tiles, batch),
        kernels.threads,
        (*read, *cut, *exact, scale, cap, totals, outputs),
    )

    groups = FINISH_THREADS // (128 if variant.value.dim <= 128 else 256)
    many = columns * layout.heads * batch > kernels.blocks and groups * parts <= MOST_TOTALS
    merged = totals, outputs, columns, padded, parts, windows, tokens
    last = *merged, *transforms[1], sinks, result
    blocks = -(-columns // groups) if many else columns
    finish = kernels.finish_many if many else kernels.finish
    launch(finish, (blocks, layout.heads, batch), FINISH_THREADS, last)
    return result.to(result_type)


def _check(variant: Variant, grid: tuple[int, int], head: ExactWindow, tail: ExactWindow) -> None:
    """Raise `RotationZooError` for what the kernels cannot take."""
    key, value, dtype = variant.key, variant.value, variant.dtype
    exact = head.key.shape[2] + tail.key.shape[2]
    if not supports(key, value, dtype, exact):
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


def _transform(side: PackedSide) -> tuple[torch.Tensor, torch.Tensor | None]:
    mean = side.mean
    return side.matrix.float().contiguous(), None if mean is None else mean.float().contiguous()


def _window(window: ExactWindow, dtype: torch.dtype) -> tuple[Argument, ...]:
    rows = window.key.to(dtype).contiguous(), window.value.to(dtype).contiguous()
    lengths = None if window.lengths is None else _counts(window.lengths)
    return *rows, lengths, window.key.shape[2]


def _counts(lengths: torch.Tensor) -> torch.Tensor:
    return lengths.int().contiguous()
