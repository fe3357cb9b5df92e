"""The tokens of one layer in a server's pages: every token as codes, and exact copies of the pages
that windows touch.

A page must be readable by itself: prefix caching hands it to another request, preemption frees it,
and a prompt fills it in parts. So a token is written as codes as soon as it is there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, overload

import torch

from rotationzoo.codec import attention, cuda_attention
from rotationzoo.codec.attention import ExactWindow, PackedSide, PackedTokens, Scores
from rotationzoo.codec.cuda import (
    FEW_THREADS,
    Argument,
    Kernel,
    Launcher,
    Packed,
    Variant,
    build,
)
from rotationzoo.codec.cuda_encoder import Encoder, kernels_run_on
from rotationzoo.codec.pages import PageLayout, Sections
from rotationzoo.codec.settings import CacheSettings
from rotationzoo.errors import RotationZooError
from rotationzoo.rotations import SIDES
from rotationzoo.vllm.prompts import (
    Attention,
    Rows,
    Scratch,
    TorchAttention,
    attend_prompts,
    new_scratch,
)
from rotationzoo.vllm.segments import Exact, Segment
from rotationzoo.vllm.steps import CopiedTokens, DecodeMetadata, Step

_STORE = Path(__file__).with_name("store.cu")
_RESTORE = Path(__file__).with_name("restore.cu")
"""Continues `codec/int2.cu`: both are compiled as one program."""
_STORE_FEW = Path(__file__).with_name("store_few.cu")
"""Continues `codec/feedback.cu`, in the same way."""


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


@dataclass(frozen=True)
class Turns:
    """What takes prompts' queries to the frame of the codes, and what they read back from it."""

    query: torch.Tensor
    """`[H_q, D, D]`, and so is the next one."""
    output: torch.Tensor
    mean: torch.Tensor | None
    """Of values, `[H_q, D]`, where they are centered."""


class LayerPages:
    """The pages of one layer: the tensor that a server has allocated, and the exact copies."""

    def __init__(
        self,
        settings: CacheSettings,
        layer: int,
        cache: torch.Tensor,
        slots: int,
        dtype: torch.dtype,
        prompt_tools: tuple[Attention, Scratch] | None = None,
    ):
        """For a tensor `[pages, H, P, ...]` of a server, whose pages are contiguous, and so many
        slots of copies of this type. `settings` have the rotations on the tensor's device, and
        `prompt_tools` let prompts attend, by default in plain torch. Raises `RotationZooError` for
        pages of other bytes than this layer's."""
        self.codec, self.format, self.layer = settings.codec, settings.layout.format, layer
        self._place = cache.data_ptr(), cache.shape
        self.prompt_tools = prompt_tools or (TorchAttention(), partial(new_scratch, cache.device))
        self._made_turns: Turns | None = None
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
        device = rows["key"].device
        encoders = {
            side: self.codec.encoder(self.layer, side, self.format, device) for side in SIDES
        }
        few = [encoder for encoder in encoders.values() if encoder and encoder.few]
        if len(few) == len(SIDES) and few[0].is_for_few(len(rows["key"]) * self.heads):
            self._store_few(step, rows, few)
            return
        for side, of_side in rows.items():
            encoder = encoders[side]
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
        rows = _by_token(rows, copies.dtype)
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

    def _store_few(
        self, step: Step, rows: dict[str, torch.Tensor], encoders: Sequence[Encoder]
    ) -> None:
        """Rotate rows, choose their codes by error feedback, and write these to pages and the rows
        to copies: in one launch, or in two where keys and values have different bits."""
        sides = []
        for side, encoder in zip(SIDES, encoders, strict=True):
            copies = self.copies[side]
            of_side = _by_token(rows[side], copies.dtype)
            mean = self.codec.rotations[self.layer][side].mean
            matrix = self.codec.forward(self.layer, side)
            kept = of_side, of_side.stride(0), matrix, mean, *encoder.inputs
            sides.append((*kept, self.memory[side], copies, encoder.refused))
        layouts = [self.layouts[side] for side in SIDES]
        alike = layouts[0] == layouts[1]
        launches = [sides]
        if not alike:
            launches = [[each, each] for each in sides]
        tokens = step.pages, step.page_offsets, step.slots, self.memory["key"].stride(0)
        for layout, both in zip(layouts, launches, strict=False):
            kernel = _few_kernel(layout, self.copies["key"].dtype, step.pages.device)
            arguments = *tokens, *layout.starts[1:4], *both[0], *both[1]
            grid = len(rows["key"]), self.heads, 1 + alike
            Launcher(step.pages.device)(kernel, grid, FEW_THREADS, arguments)

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
        prompts = step.prompts
        if prompts is None:
            self._attend_single(step, query, scores, output)
            return
        if prompts.token:
            singles = slice(prompts.token)
            self._attend_single(step, query[singles], scores, output[singles])
        several = slice(prompts.token, None)
        new = {side: of_side[several] for side, of_side in rows.items()}
        read, output = query[several], output[several]
        attend_prompts(self, step, read, new, scores, output, *self.prompt_tools)

    def _attend_single(
        self, step: Step, query: torch.Tensor, scores: Scores, output: torch.Tensor
    ) -> None:
        decode = step.decode
        key, value = (self._packed(decode, step.room, side) for side in SIDES)
        packed = PackedTokens(key, value, decode.ends, decode.starts)
        windows = self._window(decode.sink), self._window(decode.recent)
        exact = sum(window.tokens for window in windows)
        has_kernel = kernels_run_on(query.device) and cuda_attention.supports(
            key.layout, value.layout, query.dtype, exact
        )
        query, output = query[:, :, None], output[:, :, None]
        if has_kernel:
            cuda_attention.attend(query, packed, *windows, scores, output=output)
        else:
            output[:] = attention.attend(query, packed, *windows, scores)

    def _packed(self, decode: DecodeMetadata, room: int, side: str) -> PackedSide:
        memory, table = self.memory[side], decode.page_table
        blocks = PageBlocks(memory, table, room)
        packed = self.codec.packed_side(self.layer, side, self.layouts[side], blocks)
        return replace(packed, table=table, base=memory.data_ptr())

    def _window(self, window: CopiedTokens) -> ExactWindow:
        copies = self.copies["key"], self.copies["value"]
        return ExactWindow(*copies, window.lengths, window.starts, window.slots)

    def exact_keys(self, rows: torch.Tensor) -> torch.Tensor:
        """Keys `[T, H, D]` without their mean, where they are centered."""
        return self.codec.keep_exact(rows.transpose(0, 1), self.layer, "key").transpose(0, 1)

    def to_codes(self, query: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Queries `[T, H_q, D]` in the frame of dequantized keys, in `output`."""
        return _multiply(query, self._turns(query).query, output)

    def from_codes(self, read: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """What was read of dequantized values `[T, H_q, D]` in the model's frame, in `output`."""
        turns = self._turns(read)
        _multiply(read, turns.output, output)
        return output if turns.mean is None else output.add_(turns.mean)

    def _turns(self, like: torch.Tensor) -> Turns:
        """The matrices for queries `[T, H_q, D]` like these, made once."""
        if self._made_turns is None:
            group = like.shape[1] // self.heads
            key, value = (self.codec.inverse(self.layer, side) for side in SIDES)
            mean = self.codec.rotations[self.layer]["value"].mean
            # With key = stored @ matrix, query . key = (query @ matrix.T) . stored.
            query, output = (each.to(like).repeat_interleave(group, 0) for each in (key.mT, value))
            if mean is not None:
                mean = mean.to(like).repeat_interleave(group, 0)
            self._made_turns = Turns(query, output, mean)
        return self._made_turns

    def gather(self, step: Step, exact: Exact, rows: Rows, into: Sequence[torch.Tensor]) -> None:
        """Write the keys and values that a group of prompts reads exact to `into`, `[room, H, D]`
        each: copies, and then those of `rows` `[T, H, D]`; keys without their mean."""
        prompts = step.prompts
        assert prompts is not None
        table, contexts = prompts.page_table[exact.prompts], prompts.contexts[exact.prompts]
        new = {side: _by_token(rows[side][exact.tokens], into[0].dtype) for side in SIDES}
        if kernels_run_on(into[0].device):
            mean = self.codec.rotations[self.layer].key.mean
            mean = None if mean is None else mean.float()
            source: list[Argument] = [
                step.slot_of,
                self.memory["key"].stride(0),
                contexts,
                exact.bounds,
                mean,
                *(of_side.stride(0) for of_side in new.values()),
                *self.copies.values(),
                *new.values(),
                *into,
            ]
            self._launch("gather", exact.read, table, source, into[0].dtype)
            return
        prompt, position = exact.read.positions()
        pages, at = self._places(table, prompt, position)
        later = position - contexts[prompt]
        number = exact.bounds[prompt] + later.clamp(min=0)
        for side, target in zip(SIDES, into, strict=True):
            copies = self.copies[side][step.slot_of[pages], :, at]
            gathered = torch.where((later >= 0)[:, None, None], new[side][number], copies)
            target[: len(pages)] = self.exact_keys(gathered) if side == "key" else gathered

    def restore(self, step: Step, segment: Segment, into: Sequence[torch.Tensor]) -> None:
        """Write the dequantized keys and values of a segment to `into`, `[room, H, D]` each."""
        assert step.prompts is not None
        table = step.prompts.page_table
        for side, target in zip(SIDES, into, strict=True):
            layout, memory = self.layouts[side], self.memory[side]
            if kernels_run_on(target.device):
                source: list[Argument] = [memory, *layout.starts[1:4], target]
                self._launch("restore_rows", segment, table, source, target.dtype, layout)
                continue
            pages, at = self._places(table, *segment.positions())
            sections = (section[pages, :, at] for section in layout.view(memory))
            target[: len(pages)] = layout.dequantize(Sections(*sections))

    def _places(
        self, table: torch.Tensor, prompt: torch.Tensor, position: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The numbers of the pages of tokens, and the tokens' offsets there."""
        number = (position // self.tokens).clamp(max=table.shape[1] - 1)  # of new tokens: any
        return table[prompt, number] // self.memory["key"].stride(0), position % self.tokens

    def _launch(
        self,
        name: str,
        segment: Segment,
        table: torch.Tensor,
        source: Sequence[Argument],
        dtype: torch.dtype,
        layout: PageLayout | None = None,
    ) -> None:
        """Launch a kernel of `restore.cu`, for both sides where no layout is given."""
        sides, layout = (1, layout) if layout else (2, self.layouts["key"])
        kernel = _restore_kernel(name, layout, dtype, table.device)
        tokens = segment.bounds, segment.firsts, segment.jumps, segment.gaps, len(segment.firsts)
        grid = -(-segment.room // kernel.block_rows), self.heads, sides
        arguments = *tokens, table, table.stride(0), *source
        Launcher(table.device)(kernel.function, grid, kernel.threads, arguments, early=False)


@cache
def _few_kernel(layout: PageLayout, dtype: torch.dtype, device: torch.device) -> Any:
    """The kernel of `store_few.cu` for pages of this layout and rows of this type."""
    group = layout.dim // layout.groups
    variant = Variant(layout.dim, group, dtype, layout.format, feedback=True)
    macros = (*variant.macros(), ("TOKENS", str(layout.tokens)))
    return build(variant.source + _STORE_FEW.read_text(), macros, device).get_kernel("store_few")


@cache
def _restore_kernel(
    name: str, layout: PageLayout, dtype: torch.dtype, device: torch.device
) -> Kernel:
    """A kernel of `restore.cu`, for pages of this layout and rows of this type."""
    variant = Variant(layout.dim, layout.dim // layout.groups, dtype, layout.format)
    macros = (*variant.macros(), ("TOKENS", str(layout.tokens)))
    code = build(variant.source + _RESTORE.read_text(), macros, device)
    return Kernel(code.get_kernel(name), variant.block_rows, variant.threads)


def _by_token(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows `[T, H, D]` of a type, those of a token without gaps, as kernels read them."""
    rows = rows.to(dtype)
    return rows if rows.stride()[1:] == (rows.shape[-1], 1) else rows.contiguous()


def _multiply(rows: torch.Tensor, matrices: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Rows `[T, H, D]` times the matrices of their heads `[H, D, D]`, without a copy of either."""
    torch.bmm(rows.transpose(0, 1), matrices, out=output.transpose(0, 1))
    return output
