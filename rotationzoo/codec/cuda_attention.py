"""Attention over packed keys and values on an NVIDIA GPU: `attention.cu` launched, as
`codec.attention` defines it."""

import torch

from rotationzoo.codec.attention import ExactWindow, PackedSide, PackedTokens, Scores
from rotationzoo.codec.attention_kernels import (
    FINISH_THREADS,
    MOST_TOTALS,
    PREPARE_THREADS,
    Argument,
    Launcher,
    Variant,
    choose_columns,
    choose_splits,
    compiled,
    supports,
)
from rotationzoo.errors import RotationZooError

__all__ = ["attend", "supports"]


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
    splits = min(splits, MOST_TOTALS - windows)
    parts, padded = windows + splits, tiles * width

    query = query.contiguous()
    rows = batch, layout.heads, padded
    prepared = query.new_empty(*rows, variant.column_bytes, dtype=torch.int8)
    headers = query.new_empty(*rows, 2 + layout.dim // variant.key_group, dtype=torch.float32)
    totals = headers.new_empty(*rows, parts, 2)
    outputs = headers.new_empty(*rows, parts, variant.value.dim)
    result = query.new_empty(batch, query_heads, tokens, variant.value.dim)
    launch = Launcher(query.device)
    turned = query, columns, *_transform(packed.key), scores.scale, prepared, headers
    launch(kernels.prepare, (layout.heads, tiles, batch), PREPARE_THREADS, turned)

    tables = [side.addresses().contiguous() for side in (packed.key, packed.value)]
    pages = [table.shape[1] for table in tables]
    read: list[Argument] = [query, columns, tokens, prepared, headers, *tables, *pages]
    cut = packed.lengths, splits, tiles
    exact = [*_window(head, query.dtype), *_window(tail, query.dtype)]
    capped = scores.scale, scores.soft_cap or 0.0
    launch(
        kernels.attend,
        (parts, layout.heads * tiles, batch),
        kernels.threads,
        (*read, *cut, *exact, *capped, totals, outputs),
    )

    groups = FINISH_THREADS // (128 if variant.value.dim <= 128 else 256)
    many = columns * layout.heads * batch > kernels.blocks and groups * parts <= MOST_TOTALS
    sinks = None if scores.sinks is None else scores.sinks.float().contiguous()
    merged = totals, outputs, columns, padded, parts, windows, tokens
    last = *merged, *_transform(packed.value), sinks, result
    blocks = -(-columns // groups) if many else columns
    finish = kernels.finish_many if many else kernels.finish
    launch(finish, (blocks, layout.heads, batch), FINISH_THREADS, last)
    return result.to(result_type)


def _transform(side: PackedSide) -> tuple[torch.Tensor, torch.Tensor | None]:
    mean = side.mean
    return side.matrix.float().contiguous(), None if mean is None else mean.float().contiguous()


def _window(window: ExactWindow, dtype: torch.dtype) -> tuple[Argument, ...]:
    rows = window.key.to(dtype).contiguous(), window.value.to(dtype).contiguous()
    return *rows, window.lengths, window.key.shape[2]
