"""A layer whose decoding steps run on tensors of a fixed size and place, so that a CUDA graph can
replay them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from rotationzoo.cache.decoding_step import DecodingStep, LazyRows, MaskCheck, Rows
from rotationzoo.cache.rotated_layer import RotatedLayer
from rotationzoo.codec.attention import ExactWindow, PackedTokens, Scores
from rotationzoo.errors import UnsupportedModel
from rotationzoo.rotations import SIDES

Attend = Callable[[torch.Tensor, PackedTokens, ExactWindow, ExactWindow, Scores], torch.Tensor]
"""`codec.attention.attend`, or the kernel with the same arguments."""


class Counters:
    """How many tokens are where, on the device. The layers of a step share them."""

    def __init__(self, batch: int, device: torch.device):
        self.place = torch.zeros(1, dtype=torch.long, device=device)
        """Where in the tail the new token goes."""
        self.position = torch.zeros(batch, 1, dtype=torch.long, device=device)
        """The position of the new token in every row."""
        self.head = torch.zeros(batch, dtype=torch.int32, device=device)
        self.packed = torch.zeros_like(self.head)
        self.tail = torch.zeros_like(self.head)
        """Tokens of every row in the tail, with the new one."""

    def set(self, head: int, packed: int, tail: int) -> None:
        """Count so many tokens before the next step. Nothing waits for the device."""
        self.place.fill_(tail)
        self.position.fill_(head + packed + tail)
        self.head.fill_(head)
        self.packed.fill_(packed)
        self.tail.fill_(tail + 1)

    def advance(self) -> None:
        """Count the new token."""
        for counter in (self.place, self.position, self.tail):
            counter.add_(1)


class FixedLayer(CacheLayerMixin):
    """The stream of a `RotatedLayer` during steps of one token.

    The exact windows lie in buffers. A step writes its token into the tail at a place that is read
    on the device, and reads windows and pages up to lengths that are on the device, too. `flush`
    lets the stream quantize what has left the recent window.
    """

    is_sliding = False

    def __init__(self, layer: RotatedLayer, counters: Counters, room: int, attend: Attend):
        """Take over the stream of a layer, until `close`. The tail gets `room` tokens between two
        flushes."""
        CacheLayerMixin.__init__(self)
        self.layer, self.counters, self.attend, self.room = layer, counters, attend, room
        (self.stream,) = layer.streams
        room_for_all = max(self.limit, self.stream.exact_tokens)
        self.head = self._buffers(layer.storage.windows.sink)
        self.tail = self._buffers(room_for_all)
        self.masks = MaskCheck()
        """Knows the mask that a step is given: one that hides nothing."""
        self.is_initialized = True
        self._take_over()
        layer.lent = True

    @property
    def limit(self) -> int:
        """The length of the tail from which on it is flushed before the next step."""
        # A group of tokens may wait for its last one, and the sink for the first quantized token.
        waiting = self.layer.storage.arm.token_group - 1
        if not self.stream.head:
            waiting += self.layer.storage.windows.sink
        return self._kept + waiting + self.room

    @property
    def held(self) -> int:
        """The length of the tail, by how many tokens the cache has read. A flush that ran out of
        memory has shortened that of some layers."""
        return self.layer.columns - self.stream.tail_start

    def flush(self, length: int) -> None:
        """Quantize those of `length` tokens in the tail that the next token need not read exact."""
        self._hand_back(length)
        self.stream.quantize_before(self.stream.length - self._kept)
        self._take_over()

    def close(self, length: int) -> None:
        """Give the stream its tail of `length` tokens, so that the layer is what it was before.
        This takes no memory."""
        self._hand_back(length)
        self.layer.columns = self.stream.length
        self.layer.lent = False

    def tidy(self) -> None:
        """After `close`, free the buffers and quantize what has left the recent window."""
        self.stream.tail = {side: rows.clone() for side, rows in self.stream.tail.items()}
        self.layer.trim()

    @property
    def windows(self) -> tuple[ExactWindow, ExactWindow]:
        """The exact tokens before and after the quantized ones."""
        head = ExactWindow(self.head["key"], self.head["value"], self.counters.head)
        return head, ExactWindow(self.tail["key"], self.tail["value"], self.counters.tail)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Rows:
        """Store the keys and values `[B, H, 1, D]` of new tokens. What is returned holds no
        numbers: only an attention that reads pages can use it."""
        for side, rows in zip(SIDES, (key_states, value_states), strict=True):
            self.tail[side].index_copy_(2, self.counters.place, rows)
        step = FixedStep([self.stream], [0], self.stream.length + 1, 1, _refuse, self.masks, self)
        return LazyRows(step, 0, key_states), LazyRows(step, 1, value_states)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: the layer holds tokens from the beginning."""

    def get_seq_length(self) -> Any:
        """How many tokens were read: a number on the device, as `StaticLayer` of transformers has
        it, because a graph must not remember it."""
        return self.counters.position[0, 0]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many columns the mask of a call has, and the first of them. No model needs to know:
        it is given a mask."""
        return query_length, 0

    def get_max_length(self) -> int:
        """-1: there may be any number of tokens."""
        return -1

    @property
    def _kept(self) -> int:
        """How many tokens before the new one it reads exact."""
        return max(0, self.layer.storage.windows.recent - 1)

    def _buffers(self, tokens: int) -> dict[str, torch.Tensor]:
        buffers = {}
        for side, rows in self.stream.tail.items():
            batch, heads, _, dim = rows.shape
            buffers[side] = rows.new_zeros(batch, heads, tokens, dim)
        return buffers

    def _hand_back(self, length: int) -> None:
        self.stream.tail = {side: rows[:, :, :length] for side, rows in self.tail.items()}

    def _take_over(self) -> None:
        """Copy the exact tokens of the stream into the buffers, and know its pages."""
        stream = self.stream
        for side in SIDES:
            rows = stream.tail[side]
            kept = self.tail[side][:, :, : rows.shape[2]]
            kept.copy_(rows)
            stream.tail[side] = kept  # frees the copy
            if stream.head:
                self.head[side].copy_(stream.head[side])
        self.packed = replace(stream.packed(), lengths=self.counters.packed)


@dataclass(eq=False)
class FixedStep(DecodingStep):
    """What a new token reads in a `FixedLayer`."""

    layer: FixedLayer | None = None

    def attend(self, query: torch.Tensor, scores: Scores) -> torch.Tensor:
        """The attention output `[B, H_q, 1, D_v]` of queries `[B, H_q, 1, D]`."""
        assert self.layer is not None
        return self.layer.attend(query, self.layer.packed, *self.layer.windows, scores)


def _refuse() -> Rows:
    raise UnsupportedModel(
        "this model does more with keys and values than eager, sdpa or FlashAttention do, so its "
        "steps cannot run on a cache of a fixed place",
        hint="use the cache without a DecodingGraph",
    )
