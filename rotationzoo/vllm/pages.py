"""The tokens of one layer in a server's pages: every token as codes, and exact copies of the pages
that windows touch.

A page must be readable by itself: prefix caching hands it to another request, preemption frees it,
and a prompt fills it in parts. So a token is written as codes as soon as it is there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, overload

import torch

from rotationzoo.codec import attention, cuda, cuda_attention
from rotationzoo.codec.attention import ExactWindow, PackedSide, PackedTokens, Scores
from rotationzoo.codec.cuda import Argument, Launcher, build
from rotationzoo.codec.cuda_encoder import Encoder, kernels_run_on
from rotationzoo.codec.page_layout import PageLayout
from rotationzoo.codec.settings import CacheSettings
from rotationzoo.errors import RotationZooError
from rotationzoo.rotations import SIDES
from rotationzoo.vllm.steps import CopiedTokens, DecodeMetadata, Step

_STORE = Path(__file__).with_name("store.cu")
_STORE_FEW = Path(__file__).with_name("store_few.cu")
"""Continues `codec/feedback.cu`: both are compiled as one program."""
Rows = dict[str, torch.Tensor]
Work = Callable[[], None]


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
    def write(self, step: Step, rows: Rows) -> None:
        """Store new tokens `[T, H, D]` of each side as codes, and copy those of copied pages."""
        if few := self.find_few(rows):
            self._copy_few(step, rows)
            self._store_few(step, rows, few)
            return
        device = rows["key"].device
        for side, of_side in rows.items():
            encoder = self.codec.encoder(self.layer, side, self.format, device)
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

    @torch.no_grad()
    def write_and_attend(
        self, step: Step, rows: Rows, query: torch.Tensor, scores: Scores, output: torch.Tensor
    ) -> None:
        """Do as `write` and `attend` do. The codes of few new tokens are chosen and stored while
        queries, which read these exact, are at work."""
        few = self.find_few(rows)
        if not few or not step.decode.copied:
            self.write(step, rows)
            self.attend(step, query, scores, output)
            return
        wait = work_beside(query.device, lambda: self._store_few(step, rows, few))
        self._copy_few(step, rows)
        self.attend(step, query, scores, output)
        wait()

    def _store(self, step: Step, side: str, rows: torch.Tensor, packed: cuda.Packed) -> None:
        """Write packed rows to pages, and the rows to copies, in one launch."""
        layout, memory, copies = self.layouts[side], self.memory[side], self.copies[side]
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

    def find_few(self, rows: Rows) -> list[Encoder]:
        """The sides' encoders, where kernels choose codes of few rows by error feedback."""
        device, count = rows["key"].device, len(rows["key"]) * self.heads
        encoders = [self.codec.encoder(self.layer, side, self.format, device) for side in SIDES]
        few = [each for each in encoders if each and each.is_for_few(count)]
        return few if len(few) == len(SIDES) else []

    def _copy_few(self, step: Step, rows: Rows) -> None:
        """Write few rows to the copies."""
        arguments: list[Argument] = [step.page_offsets, step.slots]
        for side, of_side in rows.items():
            arguments += of_side, of_side.stride(0), self.copies[side]
        self._launch_few("copy_few", self.layouts["key"], rows, 2, arguments)

    def _store_few(self, step: Step, rows: Rows, encoders: Sequence[Encoder]) -> None:
        """Rotate rows, choose their codes by error feedback, and write these to pages: in one
        launch, or in two where keys and values have different bits."""
        sides = []
        for side, encoder in zip(SIDES, encoders, strict=True):
            mean = self.codec.rotations[self.layer][side].mean
            matrix = self.codec.forward(self.layer, side)
            kept = rows[side], rows[side].stride(0), matrix, mean, *encoder.inputs
            sides.append((*kept, self.memory[side], encoder.refused))
        layouts = [self.layouts[side] for side in SIDES]
        alike = layouts[0] == layouts[1]
        launches = [sides]
        if not alike:
            launches = [[each, each] for each in sides]
        tokens = step.pages, step.page_offsets, self.memory["key"].stride(0)
        for layout, both in zip(layouts, launches, strict=False):
            arguments = *tokens, *layout.starts[1:4], *both[0], *both[1]
            self._launch_few("store_few", layout, rows, 1 + alike, arguments)

    def _launch_few(
        self, name: str, layout: PageLayout, rows: Rows, sides: int, arguments: Sequence[Argument]
    ) -> None:
        device = rows["key"].device
        kernel = _few_kernel(name, layout, self.copies["key"].dtype, device)
        grid = len(rows["key"]), self.heads, sides
        Launcher(device)(kernel, grid, cuda.FEW_THREADS, arguments)

    @cached_property
    def _store_kernel(self) -> Any:
        numbers = self.format.metadata_numbers
        macros = ("TOKENS", str(self.tokens)), ("NUMBERS", str(numbers))
        return build(_STORE.read_text(), macros, self.memory["key"].device).get_kernel("store")

    @torch.no_grad()
    def attend(self, step: Step, query: torch.Tensor, scores: Scores, output: torch.Tensor) -> None:
        """Write what the queries `[T, H_q, D]` of few new tokens of each request, which are stored
        already, read to `output` `[T, H_q, D]`: the last `recent` tokens, themselves included, and
        the sink exact. Tokens without copies are read from their codes, and so are those before
        them in the window."""
        decode = step.decode
        key, value = (self._packed(decode, step.room, side) for side in SIDES)
        floors = decode.floors if decode.new > 1 else None
        packed = PackedTokens(key, value, decode.ends, decode.starts, floors)
        windows = self._window(decode.sink), self._window(decode.recent)
        exact = sum(window.tokens for window in windows)
        into, spread = output, decode.spread
        if spread is not None:
            query = query[spread[0]]
            into = torch.empty_like(query)
        queries, results = (
            each.unflatten(0, (-1, decode.new)).transpose(1, 2) for each in (query, into)
        )
        alike = output.dtype == query.dtype == self.copies["key"].dtype
        has_kernel = alike and kernels_run_on(query.device)
        if has_kernel and cuda_attention.supports(key.layout, value.layout, query.dtype, exact):
            cuda_attention.attend(queries, packed, *windows, scores, output=results)
        else:
            results[:] = attention.attend(queries, packed, *windows, scores)
        if spread is not None:
            output.copy_(into[spread[1]])

    def _packed(self, decode: DecodeMetadata, room: int, side: str) -> PackedSide:
        memory, table = self.memory[side], decode.page_table
        blocks = PageBlocks(memory, table, room)
        packed = self.codec.packed_side(self.layer, side, self.layouts[side], blocks)
        return replace(packed, table=table, base=memory.data_ptr())

    def _window(self, window: CopiedTokens) -> ExactWindow:
        copies = self.copies["key"], self.copies["value"]
        return ExactWindow(*copies, window.lengths, window.starts, window.slots)


def work_beside(device: torch.device, work: Work, beside: bool = True) -> Work:
    """Work on another stream of a GPU, where it is to be `beside` what follows; what is returned
    lets the current one wait for it."""
    if device.type != "cuda" or not beside:
        work()
        return lambda: None
    current, other = torch.cuda.current_stream(device), _other_stream(device)
    other.wait_stream(current)
    with torch.cuda.stream(other):
        work()
    return lambda: current.wait_stream(other)


_other_stream = cache(torch.cuda.Stream)
"""The stream of a GPU for work beside the current one."""


@cache
def _few_kernel(name: str, layout: PageLayout, dtype: torch.dtype, device: torch.device) -> Any:
    """A kernel of `store_few.cu` for pages of this layout and rows of this type."""
    group = layout.dim // layout.groups
    variant = cuda.Variant(layout.dim, group, dtype, layout.format, feedback=True)
    macros = (*variant.macros(), ("TOKENS", str(layout.tokens)))
    kernel = build(variant.source + _STORE_FEW.read_text(), macros, device).get_kernel(name)
    cuda.run_beside(kernel, device)
    return kernel
