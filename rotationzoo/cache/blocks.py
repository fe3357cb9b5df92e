"""Packed codes with their scales and offsets, in blocks that grow by one and are never copied."""

from collections.abc import Iterator
from typing import Any

import torch

from rotationzoo.codec import int2
from rotationzoo.codec.pages import PageLayout


class Blocks:
    """The quantized tokens of one side of one layer, in blocks of `layout.tokens` tokens each.

    A block is uint8 `[B, layout.bytes]`: a page for each row of the batch. A new block is allocated
    when the last one is full. The others stay where they are, so that a long context is never
    copied to append one token, and a page can be read by its address alone.
    """

    def __init__(self, layout: PageLayout):
        self.layout = layout
        self.length = 0
        """Tokens that were appended or skipped so far; the next one gets this number."""
        self.table: dict[int, torch.Tensor] = {}
        """The block of each number: block b holds the tokens from `b * layout.tokens` on."""
        self._addresses: torch.Tensor | None = None
        self._addressed = 0

    def append(self, rows: int2.Quantized) -> None:
        """Write rows with packed codes `[B, H, T, D / 4]` after those that are stored."""
        done, count = 0, rows.codes.shape[2]
        while done < count:
            number, start = divmod(self.length, self.layout.tokens)
            step = min(self.layout.tokens - start, count - done)
            if number not in self.table:
                self.allocate(number, len(rows.codes), rows.codes.device)
            sections = _sections(self.layout.view(self.table[number]))
            for target, source in zip(sections, _sections(rows), strict=True):
                # Tokens for each entry: some share a scale.
                share = count // source.shape[2]
                target[:, :, start // share : (start + step) // share] = source[
                    :, :, done // share : (done + step) // share
                ]
            self.length += step
            done += step

    def allocate(self, number: int, batch: int, device: torch.device) -> None:
        """Make an empty block."""
        self.table[number] = self.layout.empty(batch, device)

    def skip(self, count: int) -> None:
        """Leave out tokens that nobody will read."""
        self.length += count

    def free_before(self, token: int) -> None:
        """Free every block whose tokens all come before this one."""
        tokens = self.layout.tokens
        for number in [n for n in self.table if (n + 1) * tokens <= token]:
            del self.table[number]

    def read(self, start: int, together: int) -> Iterator[tuple[int, int2.Quantized]]:
        """Yield `(first token, rows with packed codes [B, H, T, D / 4])` for the blocks with a
        token from `start` on, in order and `together` blocks at a time, without the part of the
        last one that is not filled.

        Rows of several blocks are a copy, which is far smaller than what they stand for.
        """
        tokens = self.layout.tokens
        numbers = [number for number in sorted(self.table) if (number + 1) * tokens > start]
        for begin in range(0, len(numbers), together):
            read = numbers[begin : begin + together]
            first = read[0] * tokens
            filled = min(len(read) * tokens, self.length - first)
            blocks = torch.stack([self.table[number] for number in read], dim=1)
            parts = []
            # As one block of many rows: the operations are as many as for a single block.
            for section in _sections(self.layout.view(blocks.flatten(0, 1))):
                share = tokens // section.shape[2]
                by_row = section.unflatten(0, (-1, len(read))).transpose(1, 2).flatten(2, 3)
                parts.append(by_row[:, :, : filled // share])
            yield first, int2.Quantized(*parts)

    def addresses(self) -> torch.Tensor:
        """The address of every page, int64 `[B, blocks or more]` on their device. No block may have
        been freed.

        The table is kept, and written where blocks were added: nothing waits for the GPU.
        """
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
        self._addresses, self._addressed = None, 0

    def __getstate__(self) -> dict[str, Any]:
        """A copy has blocks of its own, elsewhere."""
        return self.__dict__ | {"_addresses": None, "_addressed": 0}


def _sections(stored: int2.Quantized) -> tuple[torch.Tensor, ...]:
    return stored.codes, stored.scale, stored.offset
