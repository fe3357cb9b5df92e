"""The stored keys and values of one layer, for rows of a batch that begin at the same token."""

import copy
from collections.abc import Iterator

import torch

from rotationzoo.cache.blocks import Blocks
from rotationzoo.cache.settings import Storage
from rotationzoo.codec import int2
from rotationzoo.codec.attention import ExactWindow, PackedSide, PackedTokens
from rotationzoo.rotations import SIDES

READ_TOGETHER = {"key": 16, "value": 2}
"""Blocks that are restored in one operation. That takes twice their float32 rows, 2 MiB a block
with 8 heads of 128. More blocks are faster, but values are restored while all keys are there, so
what restoring values takes is added to the most that a layer needs."""


class Stream:
    """Keys and values `[B, H, T, D]`: the first `sink` tokens and the last ones as the model
    computed them, and those between quantized.

    Tokens are counted from the first one of the rows, without padding. Until a token is quantized
    for the first time, all of them are in the tail, and `head` is empty.
    """

    def __init__(self, storage: Storage, layer: int, key: torch.Tensor, value: torch.Tensor):
        """An empty stream for keys and values like these, which may hold any number of tokens."""
        self.storage, self.layer = storage, layer
        self.blocks = {side: Blocks(storage.page_layout(layer, side)) for side in SIDES}
        self.tail = {"key": key[:, :, :0], "value": value[:, :, :0]}
        self.head: dict[str, torch.Tensor] = {}
        self.tail_start = 0
        """The first token of the tail; all after it are exact."""
        self.first = 0
        """The first token that can still be read. Layers with a sliding window forget earlier
        ones."""

    @property
    def length(self) -> int:
        """How many tokens the rows have, including those that were forgotten."""
        return self.tail_start + self.exact_tokens

    @property
    def batch(self) -> int:
        """How many rows there are."""
        return self.tail["key"].shape[0]

    def append(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Add the exact keys and values of new tokens."""
        for side, rows in zip(SIDES, (key, value), strict=True):
            tail = self.tail[side]
            # The first tokens are not copied: a prompt may be long.
            self.tail[side] = torch.cat([tail, rows], dim=2) if tail.shape[2] else rows

    @torch.no_grad()
    def quantize_before(self, token: int) -> None:
        """Quantize the exact tokens between the sink and this one, in complete groups. Those that
        nobody will read are forgotten instead. Where memory runs out, all tokens stay exact."""
        sink, step = self.storage.windows.sink, self.storage.block_tokens
        start = max(self.tail_start, sink)
        end = self._whole_groups(token)
        if end <= start:
            return
        head, tail = self.head, {}
        if not head:
            # As a kernel reads them: models hand over transposed rows.
            heads = {side: rows[:, :, :sink] for side, rows in self.tail.items()}
            layout = torch.contiguous_format
            head = {side: rows.clone(memory_format=layout) for side, rows in heads.items()}
        forgotten = min(max(self._whole_groups(self.first), start), end)
        for side in SIDES:
            leaving = self.tail[side][:, :, start - self.tail_start : end - self.tail_start]
            # A call that ran out of memory may have written some of them.
            self.blocks[side].length = start - sink
            self.blocks[side].skip(forgotten - start)
            # A block at a time, because the codec takes float32 copies of what it quantizes.
            for begin in range(forgotten - start, end - start, step):
                rows = leaving[:, :, begin : begin + step]
                self.blocks[side].append(self.storage.quantize(rows, self.layer, side))
            blocks = self.blocks[side]
            if end - start > self.storage.arm.token_group or blocks.length % step == 0:
                # Not after each token of decoding, because it waits for the GPU.
                self.storage.check(self.layer, side, leaving.device)
            # A copy, so that a long prompt is freed when nobody reads it any more.
            tail[side] = self.tail[side][:, :, end - self.tail_start :].clone()
        self.head, self.tail, self.tail_start = head, tail, end

    def forget_before(self, token: int) -> None:
        """Free what is stored of tokens before this one, which nobody will read again."""
        self.first = max(self.first, token)
        for blocks in self.blocks.values():
            blocks.free_before(self.first - self.storage.windows.sink)

    def read(self, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values `[B, H, length - start, D]` that a query reads, in the model's frame
        and type. Keys are without their mean where they are centered."""
        return self._read_side("key", start), self._read_side("value", start)

    def packed(self) -> PackedTokens:
        """The quantized tokens, where they lie. This copies nothing and waits for nothing. Only for
        layers that forget no tokens."""
        key, value = (self._packed_side(side) for side in SIDES)
        # Not the length of the blocks: where memory ran out, the tail has some of their tokens too.
        count = max(0, self.tail_start - self.storage.windows.sink)
        device = self.tail["key"].device
        lengths = torch.full((self.batch,), count, dtype=torch.int32, device=device)
        return PackedTokens(key, value, lengths)

    def windows(self) -> tuple[ExactWindow, ExactWindow]:
        """The exact tokens before and after the quantized ones."""
        head = self.head or {side: tail[:, :, :0] for side, tail in self.tail.items()}
        return ExactWindow(**head), ExactWindow(**self.tail)

    @property
    def exact_tokens(self) -> int:
        """How many tokens at the end are exact."""
        return self.tail["key"].shape[2]

    def crop(self, count: int) -> None:
        """Take back the last tokens, at most `exact_tokens`."""
        for side, rows in self.tail.items():
            self.tail[side] = rows[:, :, : rows.shape[2] - count]

    def copy(self) -> "Stream":
        """A stream with the same content that grows by itself."""
        return copy.deepcopy(self)  # blocks are written in place

    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows `[B']` of the batch, in this order."""
        for exact in (self.head, self.tail):
            for side, tensor in exact.items():
                exact[side] = tensor.index_select(0, rows)
        for blocks in self.blocks.values():
            blocks.select(rows)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every stored tensor, with its name in a file."""
        for side in SIDES:
            for name, exact in (("head", self.head), ("tail", self.tail)):
                if side in exact:
                    yield f"{side}.{name}", exact[side]
            for number, block in self.blocks[side].table.items():
                yield f"{side}.block.{number}", block

    def _whole_groups(self, token: int) -> int:
        """The end of the last group of tokens that ends at this token or earlier."""
        sink, group = self.storage.windows.sink, self.storage.arm.token_group
        return sink + max(0, token - sink) // group * group

    def _packed_side(self, side: str) -> PackedSide:
        blocks = self.blocks[side]
        if not blocks.table:
            blocks.allocate(0, self.batch, self.tail[side].device)
        rotation = self.storage.arm.rotations[self.layer][side]
        return PackedSide(
            list(blocks.table.values()),
            blocks.layout,
            self.storage.inverse(self.layer, side),
            rotation.mean,
            blocks.addresses(),
        )

    def _read_side(self, side: str, start: int) -> torch.Tensor:
        arm, sink, blocks = self.storage.arm, self.storage.windows.sink, self.blocks[side]
        exact = arm.keep_exact(self.tail[side], self.layer, side)
        if not self.head:
            return exact[:, :, start:]
        batch, heads, _, dim = exact.shape
        read = exact.new_empty(batch, heads, self.length - start, dim)

        def write(first: int, rows: torch.Tensor) -> None:
            skipped = max(0, start - first)
            kept, begin = rows[:, :, skipped:], first + skipped - start
            read[:, :, begin : begin + kept.shape[2]] = kept

        write(0, arm.keep_exact(self.head[side], self.layer, side))
        for first, stored in blocks.read(start - sink, READ_TOGETHER[side]):
            # No name is kept for what is restored: it would outlive the next ones.
            write(sink + first, self._restore(stored, side))
        write(self.tail_start, exact)
        return read

    def _restore(self, stored: int2.Quantized, side: str) -> torch.Tensor:
        """Rows with packed codes in the model's frame, float32 `[B, H, T, D]`."""
        rotated = self.blocks[side].layout.dequantize(stored)
        return self.storage.arm.restore(rotated, self.layer, side)
