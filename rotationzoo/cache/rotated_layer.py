"""A cache layer of transformers that stores its tokens in 2 bits."""

from collections.abc import Iterator
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from rotationzoo.cache.padding import Padding, side_by_side
from rotationzoo.cache.settings import Storage
from rotationzoo.cache.stream import Stream
from rotationzoo.errors import RotationZooError
from rotationzoo.words import counted


class RotatedLayer(CacheLayerMixin):
    """The keys and values of one layer with full attention.

    `update` returns them as a query reads them: one tensor for all queries of the call. So what
    stays exact depends on how many tokens the call brings, as in `windows.Cache`:

    * One token: a decoding step. Its `recent` last tokens end with itself.
    * Several tokens: a chunk of a prompt, which reads itself exact. Of earlier tokens, `server`
      keeps only the sink exact, and `window` the `recent` tokens before the chunk as well. A chunk
      that is longer than the recent window is quantized after it was read, up to its last `recent`
      tokens.
    * Candidates of assisted decoding, one or several: the first reads what a decoding step reads,
      and the others read that and the candidates before them. As many tokens as the storage's
      `slack` stay exact in addition, so that candidates can be taken back.

    Each token is quantized once, when it leaves what later calls read exact.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, storage: Storage, index: int, padding: Padding):
        CacheLayerMixin.__init__(self)
        self.storage, self.index, self.padding = storage, index, padding
        self.record_past = False
        self._clear()

    def _clear(self) -> None:
        self.streams: list[Stream] = []
        """One for all rows, or one for each row where some begin with padding."""
        self.starts: list[int] = []
        """The column at which the rows of each stream begin."""
        self.columns = 0
        """How many tokens were read, with padding."""
        self.is_initialized = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make empty streams for keys and values of this shape. Raises `RotationZooError` where the
        rotations are for other heads or dimensions."""
        storage = self.storage.for_layer(self.index, key_states, value_states)
        self.dtype, self.device = key_states.dtype, key_states.device
        starts = self.padding.of_batch(key_states.shape[0])
        if len(set(starts)) == 1:
            self.starts = starts[:1]
            self.streams = [Stream(storage, self.index, key_states, value_states)]
        else:
            self.starts = list(starts)
            pairs = zip(key_states.split(1), value_states.split(1), strict=True)
            self.streams = [Stream(storage, self.index, key, value) for key, value in pairs]
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the keys and values `[B, H, T, D]` of new tokens, and return those `[B, H, T', D]`
        that a query reads. In columns of padding they are 0."""
        first = self.append(key_states, value_states)
        keys_and_values = self.read(first)
        self.trim()
        return keys_and_values

    def append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> int:
        """Add new tokens, and quantize what their queries do not read exact. Returns the first
        column that they read."""
        # Until a token is read that is no padding, it is not known where each row begins.
        if not any(stream.length for stream in self.streams):
            self.lazy_initialization(key_states, value_states)
        held, brought = sum(stream.batch for stream in self.streams), key_states.shape[0]
        if brought != held:
            raise RotationZooError(
                f"this cache holds {counted(held, 'row')} of a batch, and a call brings {brought}",
                hint="repeat them with cache.batch_repeat_interleave, or empty it: cache.reset()",
            )
        self._follow_padding()
        before, new = self.columns, key_states.shape[2]
        first_column = self._needed(before)
        for number, stream in enumerate(self.streams):
            rows = slice(number, number + 1) if len(self.streams) > 1 else slice(None)
            # A chunk may begin with padding, or hold nothing else.
            skipped = min(max(0, self.starts[number] - before), new)
            begin = stream.length
            stream.append(key_states[rows, :, skipped:], value_states[rows, :, skipped:])
            stream.forget_before(self._needed(begin - self._slack))
            stream.quantize_before(self._exact_before(begin, new))
        self.columns += new
        return first_column

    def read(self, first_column: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of all columns from this one on."""
        reads = []
        for start, stream in zip(self.starts, self.streams, strict=True):
            reads.append(stream.read(max(0, first_column - start)))
        width = self.columns - first_column
        keys, values = zip(*reads, strict=True)
        return side_by_side(keys, width), side_by_side(values, width)

    def trim(self) -> None:
        """Quantize what no later call reads exact, and forget what none reads at all."""
        for stream in self.streams:
            length = stream.length - self._slack
            stream.forget_before(self._needed(length))
            stream.quantize_before(length - self.storage.windows.recent)

    def _exact_before(self, begin: int, new: int) -> int:
        """The first token past the sink that `new` tokens from `begin` on read exact."""
        windows = self.storage.windows
        if new == 1 or self.record_past:
            return begin + 1 - windows.recent
        return begin if windows.prefill_layout == "server" else begin - windows.recent

    @property
    def _slack(self) -> int:
        """How many tokens may be taken back."""
        return self.storage.slack if self.record_past else 0

    def _needed(self, length: int) -> int:
        """The first token that a call after `length` tokens reads."""
        return 0

    def _follow_padding(self) -> None:
        """Move the start of rows of which only padding was read so far."""
        for number, start in enumerate(self.padding.starts[: len(self.starts)]):
            if self.streams[number].length == 0:
                self.starts[number] = start

    def get_seq_length(self) -> int:
        """How many tokens were read, with padding."""
        return self.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many columns a call of `query_length` tokens reads, and the first of them."""
        first = self._needed(self.columns)
        return self.columns + query_length - first, first

    def get_max_length(self) -> int:
        """-1: a row may have any number of tokens."""
        return -1

    def activate_past_recording(self) -> None:
        """Keep `slack` more tokens exact from now on, which `crop` may take back."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens, given as a negative number.

        Raises `RotationZooError` where some of them are quantized, or where tokens that a sliding
        window would show again are forgotten. Tokens that stay are stored as they were: after
        tokens were taken back without recording, the recent window is shorter until it fills up.
        """
        self.check_crop(tokens_to_remove)
        count = min(-tokens_to_remove, self.columns)
        for stream in self.streams:
            stream.crop(min(count, stream.length))
        self.columns -= count

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise `RotationZooError` as `crop` does, before anything changes."""
        if tokens_to_remove > 0:
            raise RotationZooError(
                f"a cache is not cropped to a length of {tokens_to_remove}",
                hint="say how many tokens to take back: crop(-1) takes back the last one",
            )
        for stream in self.streams:
            count = min(-tokens_to_remove, stream.length)
            if count > stream.exact_tokens:
                raise RotationZooError(
                    f"{count} tokens cannot be taken back: all but the last {stream.exact_tokens} "
                    "are quantized",
                    hint="make the cache with a greater slack, or read the prompt again",
                )
            if self._needed(stream.length - count) < stream.first:
                raise RotationZooError(
                    f"{count} tokens cannot be taken back: the window of layer {self.index} would "
                    "reach tokens that it forgot",
                    hint="make the cache with a greater slack, or read the prompt again",
                )

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Keep these rows `[B']`, in this order."""
        if not self.is_initialized:
            return
        numbers = beam_idx.tolist()
        # Nothing moves in most steps of a beam search that has settled.
        if numbers == list(range(self.batch)):
            return
        if len(self.streams) == 1:
            self.streams[0].select(beam_idx.to(self.device))
            return
        self.starts = [self.starts[number] for number in numbers]
        self.streams = [self.streams[number].copy() for number in numbers]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row so many times."""
        self.reorder_cache(torch.arange(self.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows that `indices` selects from a batch."""
        self.reorder_cache(torch.arange(self.batch)[indices.cpu()])

    def reset(self) -> None:
        """Forget everything."""
        self.record_past = False
        self._clear()

    @property
    def batch(self) -> int:
        """How many rows there are."""
        return sum(stream.batch for stream in self.streams)

    @property
    def bf16_bytes(self) -> int:
        """The bytes of the same tokens in bfloat16: those that the next call reads."""
        tokens = self.columns - self._needed(self.columns)
        rotations = self.storage.arm.rotations[self.index]
        elements = len(rotations.key.clip) * (rotations.key.dim + rotations.value.dim)
        return 2 * self.batch * tokens * elements

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every stored tensor, with its name in a file."""
        for number, stream in enumerate(self.streams):
            for name, tensor in stream.tensors():
                yield f"{number}.{name}", tensor
