"""Packed codes with their scales and offsets, in blocks that grow by one and are never copied."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

import torch

from rotationzoo.codec import int2
from rotationzoo.codec.formats import Packing

READ_TOGETHER = 8
"""Blocks that are dequantized in one operation. Their packed codes are copied for it, which is far
less than the rows that come out."""


@dataclass(frozen=True)
class Block:
    """A fixed number of tokens. `codes` uint8 `[B, H, N, D / 4]` are packed; `scale` and `offset`
    `[B, H, N', G]` have the type of the format."""

    codes: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The name and the tensor of each of its parts."""
        for part in fields(self):
            yield part.name, getattr(self, part.name)


class Blocks:
    """The quantized tokens of one side of one layer, in blocks of `tokens` tokens each.

    A new block is allocated when the last one is full. The others stay where they are, so that a
    long context is never copied to append one token. `tokens` is a multiple of the tokens that
    share a scale.
    """

    def __init__(self, tokens: int, packing: Packing):
        self.tokens, self.packing = tokens, packing
        self.length = 0
        """Tokens that were appended or skipped so far; the next one gets this number."""
        self.table: dict[int, Block] = {}
        """The block of each number: block b holds the tokens from `b * tokens` on."""

    def append(self, quantized: int2.Quantized) -> None:
        """Write rows `[B, H, T, D]` after those that are stored."""
        codes = int2.pack(quantized.codes, self.packing)
        rows = Block(codes, quantized.scale, quantized.offset)
        done, count = 0, codes.shape[2]
        while done < count:
            number, start = divmod(self.length, self.tokens)
            step = min(self.tokens - start, count - done)
            block = self.table.get(number) or self._allocate(number, rows)
            for (_, target), (_, source) in zip(block.tensors(), rows.tensors(), strict=True):
                # Tokens for each entry: some share a scale.
                share = count // source.shape[2]
                target[:, :, start // share : (start + step) // share] = source[
                    :, :, done // share : (done + step) // share
                ]
            self.length += step
            done += step

    def skip(self, count: int) -> None:
        """Leave out tokens that nobody will read."""
        self.length += count

    def free_before(self, token: int) -> None:
        """Free every block whose tokens all come before this one."""
        for number in [n for n in self.table if (n + 1) * self.tokens <= token]:
            del self.table[number]

    def read(self, start: int = 0) -> Iterator[tuple[int, int2.Quantized]]:
        """Yield `(first token, rows)` for the blocks with a token from `start` on, in order and
        some blocks at a time, without the part of the last one that is not filled."""
        numbers = [number for number in sorted(self.table) if (number + 1) * self.tokens > start]
        for begin in range(0, len(numbers), READ_TOGETHER):
            together = numbers[begin : begin + READ_TOGETHER]
            first = together[0] * self.tokens
            filled = min(len(together) * self.tokens, self.length - first)
            parts = []
            for blocks in zip(*(self._parts_of(number) for number in together), strict=True):
                share = self.tokens // blocks[0].shape[2]
                parts.append(torch.cat(blocks, dim=2)[:, :, : filled // share])
            codes, scale, offset = parts
            yield first, int2.Quantized(int2.unpack(codes, self.packing), scale, offset)

    def _parts_of(self, number: int) -> list[torch.Tensor]:
        return [tensor for _, tensor in self.table[number].tensors()]

    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows `[B']` of the batch, in this order. This copies every block."""
        for number, block in self.table.items():
            chosen = [tensor.index_select(0, rows) for _, tensor in block.tensors()]
            self.table[number] = Block(*chosen)

    def restore(
        self, tensors: Mapping[str, torch.Tensor], like: int2.Quantized, needed: range
    ) -> None:
        """Take over blocks from `tensors`, by part and number, such as `codes.0`.

        `like` is rows of the same kind, and `needed` the tokens that must be there. Raises
        `KeyError` for a block that is missing, and `ValueError` for one of another shape.
        """
        rows = Block(int2.pack(like.codes, self.packing), like.scale, like.offset)
        self.length = needed.stop
        for number in range(needed.start // self.tokens, -(-needed.stop // self.tokens)):
            parts = []
            for name, empty in self._allocate(number, rows).tensors():
                tensor = tensors[f"{name}.{number}"]
                if (tensor.shape, tensor.dtype) != (empty.shape, empty.dtype):
                    raise ValueError(f"block {number} has another shape or type")
                parts.append(tensor)
            self.table[number] = Block(*parts)

    def _allocate(self, number: int, like: Block) -> Block:
        """Make an empty block for rows of the shape of `like`."""
        parts = []
        for _, tensor in like.tensors():
            share = like.codes.shape[2] // tensor.shape[2]
            batch, heads, _, width = tensor.shape
            parts.append(tensor.new_zeros(batch, heads, self.tokens // share, width))
        self.table[number] = Block(*parts)
        return self.table[number]
