"""The tokens of one layer in a server's pages: every token as codes, and exact copies of the pages
that windows touch.

A page must be readable by itself: prefix caching hands it to another request, preemption frees it,
and a prompt fills it in parts. So a token is written as codes as soon as it is there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from rotationzoo.codec import attention, cuda_attention
from rotationzoo.codec.attention import ExactWindow, PackedSide, PackedTokens, Scores
from rotationzoo.codec.cuda import Argument, Launcher, Packed, build
from rotationzoo.codec.cuda_encoder import kernels_run_on
from rotationzoo.codec.pages import PageLayout, Sections
from rotationzoo.codec.settings import CacheSettings
from rotationzoo.errors import RotationZooError
from rotationzoo.rotations import SIDES
from rotationzoo.vllm.steps import Chunk, CopiedTokens, DecodeMetadata, Step

_STORE = Path(__file__).with_name("store.cu")


@dataclass(frozen=True)
class PageBlocks(Sequence[torch.Tensor]):
    """One section of the pages of B requests, as blocks `[B, bytes]`, which are copied when they
    are asked for. A kernel reads pages where they are."""

    memory: torch.Tensor
    """uint8 `[pages, bytes of the section]`."""
    page_table: torch.Tensor
    """int64 `[B, N]`, as in `DecodeMetadata`."""
    room: int

    def __len__(self) -> int:
        return self.room

    @overload
    def __getitem__(self, number: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, number: slice) -> list[torch.Tensor]: ...
    def __getitem__(self, number: int | slice) -> torch.Tensor | list[torch.Tensor]:
        if isinstance(number, slice):
            return [self[each] for each in range(self.room)[number]]
        if number >= self.room:
            raise IndexError(number)
        return self.memory[self.page_table[:, number] // self.memory.stride(0)]


class LayerPages:
    """The pages of one layer: the tensor that a server has allocated, and the exact copies."""

    def __init__(
        self,
        settings: CacheSettings,
        layer: int,
        cache: torch.Tensor,
        slots: int,
        dtype: torch.dtype,
    ):
        """For a tensor `[pages, H, P, ...]` of a server, whose pages are contiguous, and so many
        slots of copies of this type. `settings` have the rotations on the tensor's device. Raises
        `RotationZooError` for pages of other bytes than this layer's."""
        self.codec, self.format, self.layer = settings.codec, settings.layout.format, layer
        self._place = cache.data_ptr(), cache.shape
        self.heads, self.tokens = cache.shape[1:3]
        memory = cache.view(torch.uint8).flatten(1)
        self.layouts: dict[str, PageLayout] = {}
        self.memory: dict[str, torch.Tensor] = {}
        self.copies: dict[str, torch.Tensor] = {}
        begin = 0
        # A page holds the keys of its tokens, and then their values.
        for side in SIDES:
            layout = self.codec.page_layout(layer, side, self.tokens, self.format)
            self.layouts[side] = layout
            self.memory[side] = memory[:, begin : begin + layout.bytes]
            shape = slots, self.heads, self.tokens, layout.dim
            self.copies[side] = torch.zeros(shape, dtype=dtype, device=cache.device)
            begin += layout.bytes
        if begin != memory.shape[1]:
            given = memory.shape[1]
            raise RotationZooError(f"a page of layer {layer} takes {begin} bytes, and has {given}")

    def holds(self, cache: torch.Tensor) -> bool:
        """Whether these are the pages of this tensor."""
        return self._place == (cache.data_ptr(), cache.shape)

    @torch.no_grad()
    def write(self, step: Step, rows: dict[str, torch.Tensor]) -> None:
        """Store new tokens `[T, H, D]` of each side as codes, and copy those of copied pages."""
        for side, of_side in rows.items():
            encoder = self.codec.encoder(self.layer, side, self.format, of_side.device)
            if encoder is not None:
                rotated = self.codec.rotate(of_side.transpose(0, 1)[None], self.layer, side)[0]
                self._store(step, side, of_side, encoder.store(rotated))
                continue
            stored = self.codec.pack(of_side.transpose(0, 1)[None], self.layer, side, self.format)
            layout = self.layouts[side]
            sections = layout.view(self.memory[side])
            for section, value in zip(sections, layout.split(stored), strict=True):
                by_token = value[0].transpose(0, 1).to(section.dtype)
                section[step.pages, :, step.page_offsets] = by_token
            self.copies[side][step.slots, :, step.page_offsets] = of_side

    def _store(self, step: Step, side: str, rows: torch.Tensor, packed: Packed) -> None:
        """Write packed rows to pages, and the rows to copies, in one launch."""
        layout, memory, copies = self.layouts[side], self.memory[side], self.copies[side]
        rows = rows.to(copies.dtype)
        if rows.stride()[1:] != (layout.dim, 1):
            rows = rows.contiguous()
        sizes = memory.stride(0), layout.code_bytes, layout.third_bytes
        arguments: list[Argument] = [
            *(packed.codes, packed.metadata, rows, rows.stride(0) * rows.element_size()),
            *(step.pages, step.page_offsets, step.slots, memory, *sizes),
            *layout.starts[1:4],  # of third bits, scales and offsets
            *(layout.groups, packed.metadata.element_size()),
            *(copies, layout.dim * copies.element_size()),
        ]
        grid = len(rows), self.heads, 1
        Launcher(rows.device)(self._store_kernel, grid, 64, arguments, early=False)

    @cached_property
    def _store_kernel(self) -> Any:
        numbers = self.format.metadata_numbers
        macros = ("TOKENS", str(self.tokens)), ("NUMBERS", str(numbers))
        return build(_STORE.read_text(), macros, self.memory["key"].device).get_kernel("store")

    @torch.no_grad()
    def attend(
        self,
        step: Step,
        query: torch.Tensor,
        rows: dict[str, torch.Tensor],
        scores: Scores,
        output: torch.Tensor,
    ) -> None:
        """Write what the queries `[T, H_q, D]` of new tokens, which are stored already, read to
        `output` `[T, H_q, D]`.

        A single new token reads the last `recent` tokens exact, itself included. Several read
        themselves exact, and the `recent` ones before them. All read the sink exact. Tokens without
        copies are read from their codes, and so are those before them in the window.
        """
        if step.singles is None:
            output[:] = self._attend_single(step.decode, step.room, query, scores)
            return
        requests, tokens = step.singles
        if len(requests):
            decode = step.decode.select(requests)
            output[tokens] = self._attend_single(decode, step.room, query[tokens], scores)
        for chunk in step.chunks:
            part = slice(chunk.first, chunk.first + chunk.count)
            new = {side: each[part] for side, each in rows.items()}
            output[part] = self._attend_chunk(step, chunk, query[part], new, scores)

    def _attend_single(
        self, decode: DecodeMetadata, room: int, query: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        key, value = (self._packed(decode, room, side) for side in SIDES)
        packed = PackedTokens(key, value, decode.ends, decode.starts)
        windows = self._window(decode.sink), self._window(decode.recent)
        exact = sum(window.tokens for window in windows)
        has_kernel = kernels_run_on(query.device) and cuda_attention.supports(
            key.layout, value.layout, query.dtype, exact
        )
        attend = cuda_attention.attend if has_kernel else attention.attend
        return attend(query[:, :, None], packed, *windows, scores)[:, :, 0]

    def _packed(self, decode: DecodeMetadata, room: int, side: str) -> PackedSide:
        memory, table = self.memory[side], decode.page_table
        blocks = PageBlocks(memory, table, room)
        packed = self.codec.packed_side(self.layer, side, self.layouts[side], blocks)
        return replace(packed, table=table, base=memory.data_ptr())

    def _window(self, window: CopiedTokens) -> ExactWindow:
        copies = self.copies["key"], self.copies["value"]
        return ExactWindow(*copies, window.lengths, window.starts, window.slots)

    def _attend_chunk(
        self,
        step: Step,
        chunk: Chunk,
        query: torch.Tensor,
        new: dict[str, torch.Tensor],
        scores: Scores,
    ) -> torch.Tensor:
        """What several new tokens of one request read `[T, H_q, D]`."""
        read = {}
        for side, rows in new.items():
            read[side] = self.codec.keep_exact(rows.transpose(0, 1)[None], self.layer, side)
            if chunk.length > chunk.count:
                earlier = self._read_earlier(step, chunk, side).to(rows.dtype)
                read[side] = torch.cat([earlier, read[side]], 2)
        return attend_causally(query, read["key"], read["value"], scores)

    def _read_earlier(self, step: Step, chunk: Chunk, side: str) -> torch.Tensor:
        """The rows `[1, H, L, D]` of the tokens before a chunk, as its queries read them in the
        model's frame: keys without their mean where they are centered."""
        start = chunk.length - chunk.count
        memory = self.memory[side]
        page_table = step.decode.page_table[chunk.row, : -(-start // self.tokens)]
        pages = page_table // memory.stride(0)
        sections = self.layouts[side].view(memory[pages])
        parts = (section.transpose(0, 1).flatten(1, 2)[None, :, :start] for section in sections)
        stored = self.layouts[side].dequantize(Sections(*parts))
        restored = self.codec.restore(stored, self.layer, side)
        position = torch.arange(start, device=restored.device)
        sink, recent = step.decode.starts[chunk.row], step.chunk_starts[chunk.row]
        exact = (position < sink) | (position >= recent)
        slots = step.slot_of[pages][position // self.tokens]
        # Slot 0 for all that is read from codes: its copies belong to no page.
        copies = self.copies[side][torch.where(exact, slots, 0), :, position % self.tokens]
        kept = self.codec.keep_exact(copies.transpose(0, 1)[None], self.layer, side)
        return torch.where(exact[:, None], kept.to(restored.dtype), restored)


def attend_causally(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores
) -> torch.Tensor:
    """The attention output `[T, H_q, D]` of the last T tokens' queries over rows `[1, H, L, D]`."""
    queries = query.transpose(0, 1)[None]
    count, length = queries.shape[2], key.shape[2]
    if scores.soft_cap is None and scores.sinks is None:
        # As many heads as queries have: fast kernels know nothing else with this mask.
        group = queries.shape[1] // key.shape[1]
        key, value = (rows.repeat_interleave(group, 1) for rows in (key, value))
        mask = causal_lower_right(count, length)
        read = scaled_dot_product_attention(queries, key, value, attn_mask=mask, scale=scores.scale)
    else:
        position = torch.arange(length, device=query.device)
        read_rows = position <= position[length - count :, None]
        read = attention.attend_rows(queries, key, value, read_rows[None], scores)
    return read[0].transpose(0, 1)
