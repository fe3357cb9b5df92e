"""The tokens of one layer in a server's pages: every token as codes, and exact copies of the pages
that windows touch.

A page must be readable on its own: prefix caching hands it to another request, preemption frees it,
and a prompt fills it in parts. So each new token is stored as codes at once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch

from rotationzoo.codec import attention, cuda, cuda_attention, cuda_segments
from rotationzoo.codec.attention import ExactWindow, PackedSide, PackedTokens, Scores
from rotationzoo.codec.cuda import Launcher, build
from rotationzoo.codec.cuda_encoder import Encoder, kernels_run_on
from rotationzoo.codec.kernels import parameters
from rotationzoo.codec.page_layout import PageLayout
from rotationzoo.codec.settings import CacheSettings
from rotationzoo.codec.transform import SegmentLayout, list_scales
from rotationzoo.errors import RotationZooError, UnsupportedModel
from rotationzoo.rotations import SIDES
from rotationzoo.sides import rows_of
from rotationzoo.vllm.steps import CopiedTokens, DecodeMetadata, Step

Rows = dict[str, torch.Tensor]
Windows = tuple[ExactWindow, ExactWindow]


@dataclass(frozen=True)
class PageBlocks(Sequence[torch.Tensor]):
    """One section of the pages of B requests as blocks `[B, bytes]`, copied when they are read."""

    memory: torch.Tensor  # uint8 [pages, bytes of the section]
    page_table: torch.Tensor  # int64 [B, N]: the pages of each request
    length: int  # pages of one request

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: Any) -> Any:
        if number >= self.length:
            raise IndexError(number)
        return self.memory[self.page_table[:, number]]


def page_tokens(block: int) -> int:
    """Tokens per page of ours, given those per block of vLLM's. Exact copies are of pages."""
    return math.gcd(block, 64)


def split_blocks(blocks: torch.Tensor, heads: int) -> torch.Tensor:
    """View vLLM's blocks `[N, (H,) tokens, cell]`, each contiguous, as pages `[pages, H, P, cell]`,
    which share the padding of their block. Raises `UnsupportedModel` where they cannot: a page
    table holds numbers, so pages must be equally far apart."""
    *_, tokens, cell = blocks.shape
    page = page_tokens(tokens)
    each, rest = divmod(blocks.stride(0), tokens // page)
    if rest or each * blocks.itemsize % 16:  # kernels copy 16 bytes at a time
        size = blocks.stride(0) * blocks.itemsize
        raise UnsupportedModel(
            f"vLLM gives blocks of {size:,} bytes to {tokens // page} pages of rotations, next to "
            "layers of other sizes",
            hint="serve it without a draft model",
        )
    count = len(blocks) * (tokens // page)
    return blocks.as_strided((count, heads, page, cell), (each, page * cell, cell, 1))


class LayerPages:
    """The pages of one layer: the tensor that a server has allocated, and the exact copies."""

    copied: tuple[str, ...] = SIDES
    """The sides whose rows `copy` writes."""
    rope_dim = 0  # channels of exact keys beside latents
    rotates_few = True  # whether a kernel rotates and stores few rows

    def __init__(
        self,
        settings: CacheSettings,
        layer: int,
        cache: torch.Tensor,
        slots: int,
        dtype: torch.dtype,
        bad: torch.Tensor | None = None,
    ):
        """`cache`: the server's tensor `[pages, H, P, ...]`, with contiguous pages. `slots`: the
        number of exact copies, of type `dtype`. `settings`: with rotations on the tensor's device.
        `bad`, int64 `[2, 2]` on that device: for keys and for values (or latents and RoPE), the
        number of rows that are not finite or too large, and the position of the last one, in tokens
        from page 0. Raises `RotationZooError` if a page is too small for this layer."""
        self.codec, self.format, self.layer = settings.codec, settings.layout.format, layer
        self._place = cache.data_ptr(), cache.shape
        self.heads, self.tokens = cache.shape[1:3]
        cached = rows_of(self.codec.rotations[layer].sides)
        self.sides, self.counted = cached.sides, cached.names
        self.bad = torch.zeros(2, 2, dtype=torch.int64, device=cache.device) if bad is None else bad
        memory = cache.view(torch.uint8).flatten(1)
        self.page_bytes = memory.stride(0)  # from one page to the next
        self.layouts: dict[str, PageLayout | SegmentLayout] = {}
        self.memory: dict[str, torch.Tensor] = {}
        self.copies: dict[str, torch.Tensor] = {}
        taken = self._lay_out(memory, slots, dtype)
        if taken > memory.shape[1]:
            given = memory.shape[1]
            raise RotationZooError(f"a page of layer {layer} takes {taken} bytes, and has {given}")

    def _lay_out(self, memory: torch.Tensor, slots: int, dtype: torch.dtype) -> int:
        """Lay out pages uint8 `[pages, bytes]`, allocate copies, and return the bytes of a page."""
        begin = 0
        # A page holds the keys of its tokens, then their values.
        for side in SIDES:
            layout = self.codec.page_layout(self.layer, side, self.tokens, self.format)
            self.layouts[side] = layout
            self.memory[side] = memory[:, begin : begin + layout.bytes]
            shape = slots, self.heads, self.tokens, layout.dim
            self.copies[side] = torch.zeros(shape, dtype=dtype, device=memory.device)
            begin += layout.bytes
        return begin

    def holds(self, cache: torch.Tensor) -> bool:
        return self._place == (cache.data_ptr(), cache.shape)

    @torch.no_grad()
    def copy(self, step: Step, rows: Rows) -> None:
        """Write new tokens `[T, H, D]` of each side to the copies of their pages, if any."""
        device, (tokens, heads, dim) = rows["key"].device, rows["key"].shape
        if not kernels_run_on(device):
            for side in self.copied:
                self.copies[side][step.slots, :, step.page_offsets] = rows[side]
            return
        size = self.copies["key"].element_size()
        key, value = (
            parameters.CopiedRows(rows[side], rows[side].stride(0) * size, self.copies[side])
            for side in SIDES
        )
        places = step.page_offsets, step.slots
        arguments = parameters.CopyRows(*places, dim * size, key=key, value=value)
        kernel, grid = store_kernel("copy_rows", self.tokens, device), len(self.copied)
        Launcher(device)(kernel, (tokens, heads, grid), 64, arguments)

    @torch.no_grad()
    def store(self, step: Step, rows: Rows) -> None:
        """Store new tokens `[T, H, D]` of each side as codes. Unlike the codec, a server refuses no
        row: one that is not finite or too large reads back as NaN, and is counted."""
        if self.has_segments:
            self._store_segments(step, rows)
            return
        for side, of_side in rows.items():
            encoder = self.codec.encoder(self.layer, side, self.format, of_side.device)
            rotated = self.codec.rotate(of_side.transpose(0, 1)[None], self.layer, side)
            if isinstance(encoder, Encoder):
                self._store(step, side, encoder.store(rotated[0]))
                continue
            stored, is_bad = self.codec.encode(rotated, self.layer, side, self.format)
            self._count(step, side, is_bad[0])
            sections = self.layouts[side].view(self.memory[side])
            for section, value in zip(sections, stored, strict=True):
                by_token = value[0].transpose(0, 1).to(section.dtype)
                section[step.pages, :, step.page_offsets] = by_token

    def _count(self, step: Step, side: str, is_bad: torch.Tensor) -> None:
        """Count rows `[H, T]` that are bad. Padding, in page 0, belongs to nobody."""
        is_bad, bad = is_bad & (step.pages > 0), self.bad[self.counted.index(side)]
        bad[0] += is_bad.sum()
        last = (is_bad.any(0) * (step.pages * self.tokens + step.page_offsets)).amax()
        bad[1] = torch.where(last > 0, last, bad[1])

    def _store(self, step: Step, side: str, packed: cuda.Packed) -> None:
        """Write packed rows to pages, in one launch."""
        layout, memory = self.layouts[side], self.memory[side]
        assert isinstance(layout, PageLayout)
        arguments = parameters.Store(
            codes=packed.codes,
            numbers=packed.metadata,
            pages=step.pages,
            places=step.page_offsets,
            memory=memory,
            page_bytes=self.page_bytes,
            code_bytes=layout.dim // 4,
            begin=parameters.Begin(*layout.starts[1:3]),
            groups=layout.groups,
            number_bytes=packed.metadata.element_size(),
            bad=self.bad[self.counted.index(side)],
        )
        kernel = store_kernel("store", self.tokens, memory.device)
        grid = len(step.pages), self.heads, 1
        Launcher(memory.device)(kernel, grid, 64, arguments, early=False)

    def dequantize(self, side: str, pages: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """The stored rows at `places` in `pages`, float32 `[T, H, D]`, in the frame of codes."""
        layout = self.layouts[side]
        sections = layout.view(self.memory[side])
        rows = (each[pages, :, places].transpose(0, 1)[None] for each in sections)
        return layout.dequantize([*rows])[0].transpose(0, 1)

    def has_few(self, rows: Rows) -> bool:
        """Whether these rows are stored faster than a second stream starts, in one launch."""
        return self.has_segments and rows["key"].shape[:2].numel() <= cuda_segments.FEW

    @property
    def _row_type(self) -> torch.dtype:
        """Of the rows that the kernels of `segments.cu` read and write."""
        return self.copies["key"].dtype

    @property
    def has_segments(self) -> bool:
        """Whether the kernels of `segments.cu` store and restore these pages."""
        return self.codec.rounding == "transform" and kernels_run_on(self.bad.device)

    @cached_property
    def segments(self) -> dict[str, parameters.IntoPages]:
        """The arguments of these kernels for the pages of each side."""
        into = {}
        for side, bad in zip(self.sides, self.bad, strict=False):
            layout, steps = self.layouts[side], self.codec.steps(self.layer, side)
            assert isinstance(layout, SegmentLayout)
            into[side] = parameters.IntoPages(
                steps, layout.places(bad.device), self.memory[side], bad
            )
        return into

    def _store_segments(self, step: Step, rows: Rows) -> None:
        """Store rows by transform coding: few in one launch, many after torch has rotated them."""
        device, pages = step.pages.device, (step.pages, step.page_offsets, self.page_bytes)
        of_pages = self.layouts[next(iter(rows))].dim, self.tokens, self._row_type, device
        if self.rotates_few and self.has_few(rows):
            tokens, heads, dim = rows["key"].shape
            both = []
            for side, into in self.segments.items():
                matrix = self.codec.forward(self.layer, side)
                mean = self.codec.rotations[self.layer][side].mean
                given = rows[side], rows[side].stride(0)
                both.append(parameters.SegmentSide(*given, matrix, mean, into))
            few = parameters.StoreFewSegments(*pages, list_scales(device), *both)
            kernel = cuda_segments.compiled("store_few_segments", *of_pages)
            Launcher(device)(kernel, (tokens, heads, 2), 4 * dim, few)
            return
        kernel = cuda_segments.compiled("store_segments", *of_pages)
        for side, of_side in rows.items():
            channels = self.codec.rotate(of_side.transpose(0, 1)[None], self.layer, side)[0]
            cuda_segments.store_many(channels, *pages, self.segments[side], kernel)

    @torch.no_grad()
    def attend(self, step: Step, query: torch.Tensor, scores: Scores, output: torch.Tensor) -> None:
        """Attend with the queries `[T, H_q, D]` of few new tokens per request, already stored, and
        write to `output` `[T, H_q, D]`. The sink and the last `recent` tokens, up to the query's
        own, are read exact. Tokens without copies are read from codes, and so are those before them
        in the window."""
        decode = step.decode
        key, value = (self._packed(decode, step.max_pages, side) for side in SIDES)
        floors = decode.floors if decode.new > 1 else None
        packed = PackedTokens(key, value, decode.ends, decode.starts, floors)
        windows = self._window(decode.sink), self._window(decode.recent)
        into, spread = output, decode.spread
        if spread is not None:
            query = query[spread[0]]
            into = output.new_empty(*query.shape[:-1], output.shape[-1])
        queries, results = (
            each.unflatten(0, (-1, decode.new)).transpose(1, 2) for each in (query, into)
        )
        one_type = output.dtype == query.dtype == self.copies["key"].dtype
        if (
            one_type
            and kernels_run_on(query.device)
            and self._has_kernel(packed, windows, query.dtype)
        ):
            self._attend(queries, packed, windows, scores, results)
        else:
            results[:] = attention.attend(queries, packed, *windows, scores)
        if spread is not None:
            output.copy_(into[spread[1]])

    def _has_kernel(self, packed: PackedTokens, windows: Windows, dtype: torch.dtype) -> bool:
        exact = sum(window.tokens for window in windows)
        return cuda_attention.supports(packed.key.layout, packed.value.layout, dtype, exact)

    def _attend(
        self,
        queries: torch.Tensor,
        packed: PackedTokens,
        windows: Windows,
        scores: Scores,
        output: torch.Tensor,
    ) -> None:
        """Let a kernel read, with the arguments of `attention.attend`."""
        cuda_attention.attend(queries, packed, *windows, scores, output=output)

    def _packed(self, decode: DecodeMetadata, pages: int, side: str) -> PackedSide:
        memory, table = self.memory[side], decode.page_table
        blocks = PageBlocks(memory, table, pages)
        packed = self.codec.packed_side(self.layer, side, self.layouts[side], blocks)
        return replace(packed, table=table, base=memory.data_ptr(), unit=self.page_bytes)

    def _window(self, window: CopiedTokens) -> ExactWindow:
        copies = self.copies["key"], self.copies["value"]
        return ExactWindow(*copies, window.lengths, window.starts, window.slots)


@cache
def store_kernel(name: str, tokens: int, device: torch.device) -> Any:
    """A kernel of store.cu, compiled for `tokens` tokens per page."""
    kernel = build("store.cu", (("TOKENS", str(tokens)),), device).get_kernel(name)
    cuda.run_beside(kernel, device)
    return kernel
