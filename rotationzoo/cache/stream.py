"""The stored tokens of one layer: exact windows, and between them packed codes in blocks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rotationzoo.codec import attention, cuda_attention
from rotationzoo.codec.attention import ExactWindow, PackedSide, PackedTokens, Scores
from rotationzoo.codec.cuda_encoder import kernels_run_on
from rotationzoo.codec.page_layout import PageLayout
from rotationzoo.codec.settings import CacheSettings
from rotationzoo.codec.transform import SegmentLayout
from rotationzoo.rotations import SIDES
from rotationzoo.sides import read_as, rows_of

READ_TOGETHER = {"key": 16, "value": 2}
"""Blocks that are restored at once, with twice the memory of their float32 rows (2 MiB per block
with 8 heads of 128). Restoring values adds to a layer's peak, which holds all keys."""
AHEAD = 16
"""Tokens that are quantized together when decoding reaches the first of them."""
Rows = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Reach:
    """The first tokens that a call needs: earlier ones may be quantized or forgotten."""

    exact: int
    """The first token past the sink that must stay exact."""
    needed: int
    """The first token that is read at all. Only sliding windows forget tokens."""


class Stream:
    """Keys and values `[B, H, T, D]`: the first `sink` tokens and the last ones as the model
    computed them, and those between quantized. Or a single side (`rotationzoo.sides`), with rows
    that are cached next to it and stay exact.

    All rows begin at the same token, and padding does not count. Until the first token is
    quantized, all tokens are in the tail, and `head` is empty.
    """

    def __init__(self, settings: CacheSettings, layer: int, key: torch.Tensor, value: torch.Tensor):
        """An empty stream for keys and values like these, of any number of tokens."""
        self.settings, self.layer = settings, layer
        self.codec, self.layout = settings.codec, settings.layout
        self.cached = rows_of(self.codec.rotations[layer].sides)
        self.sides = self.cached.sides
        self.blocks = {side: Blocks(settings.page_layout(layer, side)) for side in self.sides}
        rows = zip(self.cached.names, (key, value), strict=True)
        self.tail = {name: tensor[:, :, :0] for name, tensor in rows}
        self.head: dict[str, torch.Tensor] = {}
        self.tail_start = 0
        """The first token of the tail."""
        self.first = 0
        """The first token that can still be read. A sliding window forgets earlier ones."""

    @property
    def length(self) -> int:
        """Tokens of a row, including forgotten ones."""
        return self.tail_start + self.exact_tokens

    @property
    def batch(self) -> int:
        return next(iter(self.tail.values())).shape[0]

    @property
    def exact_tokens(self) -> int:
        """Tokens of the tail."""
        return next(iter(self.tail.values())).shape[2]

    @property
    def elements(self) -> int:
        """Elements per token."""
        return sum(rows.shape[1] * rows.shape[3] for rows in self.tail.values())

    def update(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        now: Reach,
        later: Reach,
        read_from: int | None,
    ) -> Rows | None:
        """Add the keys and values of new tokens, and return what their queries read from token
        `read_from` on; None if the model reads pages. `now` is what these queries need, and `later`
        what the next ones need."""
        for side, rows in zip(list(self.tail), (key, value), strict=True):
            tail = self.tail[side]
            # The first tokens are not copied, because a prompt may be long.
            self.tail[side] = torch.cat([tail, rows], dim=2) if tail.shape[2] else rows
        self._leave(now)
        read = None if read_from is None else self.read(read_from)
        self._leave(later)
        return read

    def _leave(self, reach: Reach) -> None:
        """Free tokens that will not be read again, and quantize tokens that need not be exact."""
        self.first = max(self.first, reach.needed)
        for blocks in self.blocks.values():
            blocks.free_before(self.first - self.layout.sink)
        self._quantize_before(reach.exact)

    @torch.no_grad()
    def _quantize_before(self, end: int) -> None:
        """Quantize the exact tokens between the sink and token `end`, or forget those that will not
        be read again. If memory runs out, all stay exact."""
        sink, step, format = self.layout.sink, self.settings.block, self.layout.format
        start = max(self.tail_start, sink)
        if end <= start:
            return
        head, tail = self.head, {}
        if not head:
            # Kernels read contiguous rows, and models hand over transposed ones.
            heads = {side: rows[:, :, :sink] for side, rows in self.tail.items()}
            memory = torch.contiguous_format
            head = {side: rows.clone(memory_format=memory) for side, rows in heads.items()}
        forgotten = min(max(self.first, start), end)
        for side in self.sides:
            rows, blocks, kind = self.tail[side], self.blocks[side], (self.layer, side, format)
            # Skip tokens that are forgotten, or written: ahead, or before memory ran out.
            blocks.length = max(blocks.length, forgotten - sink)
            begin = sink + blocks.length
            # Without a kernel, many tokens take hardly longer than one.
            encoder = self.codec.encoder(*kind, rows.device)
            ahead = begin + 1 == end and encoder is None
            leaving = rows[:, :, begin - self.tail_start :]
            leaving = leaving[:, :, : AHEAD if ahead else max(0, end - begin)]
            # One block at a time, because the codec makes float32 copies.
            for piece in leaving.split(step, dim=2) if begin < end else ():
                blocks.append(self.codec.pack(piece, *kind))
            if encoder and (end - start > 1 or blocks.length % step == 0):
                # Not at each decoding step, because it waits for the GPU.
                encoder.check()
        for name, rows in self.tail.items():
            # A copy, so that a long prompt is freed after its last reader.
            tail[name] = rows[:, :, end - self.tail_start :].clone()
        for name in self.cached.beside:
            kept = self.tail[name][:, :, start - self.tail_start : end - self.tail_start]
            head = head | {name: torch.cat([head[name], kept], dim=2)}
        self.head, self.tail, self.tail_start = head, tail, end

    def read(self, start: int = 0) -> Rows:
        """The keys and values `[B, H, length - start, D]` that a query reads, in the model's frame
        and type, centered keys without their mean; or what is cached in their place."""
        first, second = (self._read_side(name, start) for name in self.tail)
        return first, second

    def _read_side(self, side: str, start: int) -> torch.Tensor:
        if side in self.cached.beside:
            kept = [rows[side] for rows in (self.head, self.tail) if side in rows]
            return torch.cat(kept, dim=2)[:, :, start:]
        codec, sink, blocks = self.codec, self.layout.sink, self.blocks[side]
        exact = codec.keep_exact(self.tail[side], self.layer, side)
        if not self.head:
            return exact[:, :, start:]
        batch, heads, _, dim = exact.shape
        read = exact.new_empty(batch, heads, self.length - start, dim)

        def write(first: int, rows: torch.Tensor) -> None:
            skipped = max(0, start - first)
            kept, begin = rows[:, :, skipped:], first + skipped - start
            read[:, :, begin : begin + kept.shape[2]] = kept

        write(0, codec.keep_exact(self.head[side], self.layer, side))
        together = READ_TOGETHER[read_as(side)[0]]
        for first, stored in blocks.read(start - sink, self.tail_start - sink, together):
            # A name for restored rows would keep them while the next ones are restored.
            write(sink + first, codec.restore(blocks.layout.dequantize(stored), self.layer, side))
        write(self.tail_start, exact)
        return read

    def has_kernel(self, query: torch.Tensor) -> bool:
        """Whether a kernel reads pages and windows with such queries `[B, H_q, T, D]`."""
        if self.sides != SIDES:
            return False
        exact = self.tail["key"].dtype, self.tail["value"].dtype
        if exact != (query.dtype, query.dtype) or not kernels_run_on(query.device):
            return False
        key, value = self.blocks["key"].layout, self.blocks["value"].layout
        exact_tokens = self.layout.sink + self.exact_tokens
        return cuda_attention.supports(key, value, query.dtype, exact_tokens)

    def attend(self, query: torch.Tensor, scores: Scores) -> torch.Tensor:
        """The attention output `[B, H_q, T, D_v]` of the last T tokens' queries `[B, H_q, T, D]`,
        from the codes, without a copy or a wait on a GPU. Not for layers that forget tokens."""
        attend = cuda_attention.attend if self.has_kernel(query) else attention.attend
        return attend(query, self.packed(), *self.windows(), scores)

    def packed(self) -> PackedTokens:
        """The quantized tokens in their pages."""
        key, value = (self._packed_side(side) for side in SIDES)
        # Not the length of the blocks, whose last tokens may be in the tail as well.
        count = max(0, self.tail_start - self.layout.sink)
        device = self.tail["key"].device
        lengths = torch.full((self.batch,), count, dtype=torch.int32, device=device)
        return PackedTokens(key, value, lengths)

    def windows(self) -> tuple[ExactWindow, ExactWindow]:
        """The exact tokens before and after the quantized ones."""
        head = self.head or {side: tail[:, :, :0] for side, tail in self.tail.items()}
        return ExactWindow(**head), ExactWindow(**self.tail)

    def _packed_side(self, side: str) -> PackedSide:
        blocks = self.blocks[side]
        if not blocks.table:
            blocks.allocate(0, self.batch, self.tail[side].device)
        pages = list(blocks.table.values())
        packed = self.codec.packed_side(self.layer, side, blocks.layout, pages)
        return replace(packed, table=blocks.addresses())

    def crop(self, count: int) -> None:
        """Take back the last tokens, at most `exact_tokens`."""
        for side, rows in self.tail.items():
            self.tail[side] = rows[:, :, : rows.shape[2] - count]
        for blocks in self.blocks.values():  # tokens quantized ahead may become others
            blocks.length = min(blocks.length, max(0, self.length - self.layout.sink))

    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows `[B']` of the batch, in this order."""
        for exact in (self.head, self.tail):
            for side, tensor in exact.items():
                exact[side] = tensor.index_select(0, rows)
        for blocks in self.blocks.values():
            blocks.select(rows)

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from self.head.values()
        yield from self.tail.values()
        for blocks in self.blocks.values():
            yield from blocks.table.values()


class Blocks:
    """The quantized tokens of one side of one layer, in blocks of `layout.tokens` tokens each.

    A block is uint8 `[B, layout.bytes]`: a page for each row of the batch. Blocks stay where they
    are: no token copies a long context, and kernels read pages by their addresses.
    """

    def __init__(self, layout: PageLayout | SegmentLayout):
        self.layout = layout
        self.length = 0
        """Tokens that were appended or left out so far: the number of the next one."""
        self.table: dict[int, torch.Tensor] = {}
        """Number -> block: block b holds the tokens from `b * layout.tokens` on."""
        self._last: tuple[int, Sequence[torch.Tensor]] | None = None
        """The number and the sections of the block that is being filled."""
        self._addresses: torch.Tensor | None = None
        self._addressed = 0

    def append(self, rows: Sequence[torch.Tensor]) -> None:
        """Write the sections `[B, H or 1, T, ...]` of rows after those that are stored."""
        done, count = 0, rows[0].shape[2]
        while done < count:
            number, start = divmod(self.length, self.layout.tokens)
            step = min(self.layout.tokens - start, count - done)
            if number not in self.table:
                self.allocate(number, len(rows[0]), rows[0].device)
            if self._last is None or self._last[0] != number:
                self._last = number, self.layout.view(self.table[number])
            for target, source in zip(self._last[1], rows, strict=True):
                target[:, :, start : start + step] = source[:, :, done : done + step]
            self.length += step
            done += step

    def allocate(self, number: int, batch: int, device: torch.device) -> None:
        self.table[number], self._last = self.layout.empty(batch, device), None

    def free_before(self, token: int) -> None:
        """Free the blocks that end before this token."""
        tokens = self.layout.tokens
        for number in [n for n in self.table if (n + 1) * tokens <= token]:
            del self.table[number]

    def read(
        self, start: int, end: int, together: int
    ) -> Iterator[tuple[int, Sequence[torch.Tensor]]]:
        """Yield `(first token, sections)` for the blocks with a token from `start` on, in order and
        `together` blocks at a time, up to token `end`. The sections are a copy."""
        tokens = self.layout.tokens
        numbers = [n for n in sorted(self.table) if n * tokens < end and (n + 1) * tokens > start]
        for begin in range(0, len(numbers), together):
            read = numbers[begin : begin + together]
            first = read[0] * tokens
            filled = min(len(read) * tokens, end - first)
            blocks = torch.stack([self.table[number] for number in read], dim=1)
            parts = []
            # As one block of many rows, with the same number of operations.
            for section in self.layout.view(blocks.flatten(0, 1)):
                by_row = section.unflatten(0, (-1, len(read))).transpose(1, 2).flatten(2, 3)
                parts.append(by_row[:, :, :filled])
            yield first, parts

    def addresses(self) -> torch.Tensor:
        """The address of every page, int64 `[B, blocks or more]` on their device. No block may have
        been freed. Only addresses of new blocks are written, so nothing waits for the GPU."""
        count = len(self.table)
        if self._addresses is None or count > self._addresses.shape[1]:
            device = self.table[0].device
            grown = torch.zeros(len(self.table[0]), 2 * count, dtype=torch.int64, device=device)
            if self._addresses is not None:
                grown[:, : self._addressed] = self._addresses[:, : self._addressed]
            self._addresses = grown
        for number in range(self._addressed, count):
            rows = torch.arange(len(self._addresses), device=self._addresses.device)
            start = self.table[number].data_ptr()
            self._addresses[:, number] = rows * self.layout.bytes + start
        self._addressed = count
        return self._addresses

    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows `[B']` of the batch, in this order. This copies every block."""
        for number, block in self.table.items():
            self.table[number] = block.index_select(0, rows)
        self._last, self._addresses, self._addressed = None, None, 0

    def __getstate__(self) -> dict[str, Any]:
        """A copy has other blocks, at other addresses."""
        return self.__dict__ | {"_last": None, "_addresses": None, "_addressed": 0}
