"""Layers of a cache in transformers that store their tokens in 2 bits."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from transformers import PreTrainedModel, cache_utils
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from rotationzoo.cache.paged_attention import MOST_CANDIDATES, DecodingStep, LazyRows, MaskCheck
from rotationzoo.cache.stream import Reach, Rows, Stream
from rotationzoo.codec.settings import CacheSettings
from rotationzoo.errors import RotationZooError
from rotationzoo.model.capture import given_cache
from rotationzoo.rotations import SIDES
from rotationzoo.words import counted


@dataclass
class Padding:
    """How many columns of padding each row of the batch begins with. All layers share it."""

    starts: list[int] = field(default_factory=list)
    """Empty without a mask: then no row begins with padding."""
    settled: bool = False
    """Whether every row has had a token other than padding."""

    def note(self, mask: torch.Tensor) -> None:
        """Read the padding from the mask `[B, T]` of all tokens so far, 0 for padding. Once every
        row has a token, later masks are skipped, to save time in decoding steps."""
        if self.settled:
            return
        hidden = mask.to(torch.bool).cumsum(1) == 0
        self.starts = hidden.sum(1).tolist()
        self.settled = max(self.starts, default=0) < mask.shape[1]

    def forget(self) -> None:
        self.starts, self.settled = [], False


def watch_padding(model: PreTrainedModel) -> None:
    """Make a model tell its caches about padding each time it runs."""
    if _tell_cache not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_tell_cache, with_kwargs=True)


def _tell_cache(model: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    padding = getattr(given_cache(kwargs), "padding", None)
    mask = kwargs.get("attention_mask")
    if isinstance(padding, Padding) and isinstance(mask, torch.Tensor) and mask.ndim == 2:
        padding.note(mask)


class RotatedLayer(CacheLayerMixin):
    """The keys and values of one layer with full attention.

    `update` returns one tensor for all queries of the call, so the number of new tokens decides
    which tokens stay exact, as in `CacheLayout`:

    * One token is a decoding step. Its `recent` last tokens end with itself.
    * Several tokens are a chunk of a prompt, which reads itself exact. Of earlier tokens, `server`
      keeps only the sink exact, and `window` also the `recent` tokens before the chunk. After it is
      read, a chunk is quantized up to its last `recent` tokens.
    * Candidates of assisted decoding: the first reads what a decoding step reads, and the others
      also read the candidates before them. The settings' `slack` more tokens stay exact, so that
      candidates can be taken back.

    Each token is quantized once, when later calls no longer read it exact.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, settings: CacheSettings, index: int, padding: Padding):
        CacheLayerMixin.__init__(self)
        self.settings, self.index, self.padding = settings, index, padding
        self.record_past = False
        self._clear()

    def _clear(self) -> None:
        self.streams: list[Stream] = []
        """One for all rows, or one for each row if some begin with padding."""
        self.starts: list[int] = []
        """The column at which the rows of each stream begin."""
        self.columns = 0
        """Tokens so far, with padding."""
        self.is_initialized = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make empty streams for keys and values of this shape. Raises `RotationZooError` if the
        rotations are for other heads or dimensions."""
        settings = self.settings.for_layer(self.index, key_states, value_states)
        self.dtype, self.device = key_states.dtype, key_states.device
        starts, batch = self.padding.starts, key_states.shape[0]
        starts = starts if len(starts) == batch else [0] * batch
        self.starts = starts[:1] if len(set(starts)) == 1 else list(starts)
        rows = batch // len(self.starts)
        pairs = zip(key_states.split(rows), value_states.split(rows), strict=True)
        self.streams = [Stream(settings, self.index, key, value) for key, value in pairs]
        self.is_initialized = True

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,
        masks: MaskCheck | None = None,
        **kwargs: Any,
    ) -> Rows:
        """Store the keys and values `[B, H, T, D]` of new tokens, and return those `[B, H, T', D]`
        that a query reads, 0 in columns of padding. `masks` comes from a model whose attention can
        read pages: then a decoding step gets `LazyRows`, unless all tokens are exact."""
        lazily = masks is not None and self._reads_pages(key_states)
        self._prepare(key_states, value_states)
        before, new = self.columns, key_states.shape[2]
        first_column = self._needed(before)
        self.columns += new
        reads = []
        for number, (start, stream) in enumerate(zip(self.starts, self.streams, strict=True)):
            rows = slice(number, number + 1) if len(self.streams) > 1 else slice(None)
            # A chunk may begin with padding, or be all padding.
            skipped = min(max(0, start - before), new)
            begin, end = stream.length, stream.length + new - skipped
            now = Reach(self._exact_before(begin, new), self._needed(begin - self._slack))
            later = end - self._slack
            read = stream.update(
                key_states[rows, :, skipped:],
                value_states[rows, :, skipped:],
                now,
                Reach(later - self.settings.layout.recent, self._needed(later)),
                None if lazily else max(0, first_column - start),
            )
            if read is not None:
                reads.append(read)
        if masks is None or not lazily:
            return self._side_by_side(reads, first_column)
        return self._pages(key_states, value_states, masks)

    def _prepare(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make streams for the first token, and check that a call brings the rows that are held."""
        # Until there is a token other than padding, it is not clear where each row begins.
        if not any(stream.length for stream in self.streams):
            self.lazy_initialization(key_states, value_states)
        brought = key_states.shape[0]
        if brought != self.batch:
            held = f"this cache holds {counted(self.batch, 'row')} of a batch"
            hint = "repeat them with cache.batch_repeat_interleave, or empty it: cache.reset()"
            raise RotationZooError(f"{held}, and a call brings {brought}", hint)
        # Move the start of rows that have had only padding so far.
        for number, start in enumerate(self.padding.starts[: len(self.starts)]):
            if self.streams[number].length == 0:
                self.starts[number] = start

    def _reads_pages(self, key_states: torch.Tensor) -> bool:
        """Whether a call with keys `[B, H, T, D]` may read pages: a token or a few candidates."""
        reading = self.settings.reading
        if reading == "rows" or self.is_sliding or not self.streams:
            return False
        if self.streams[0].sides != SIDES:  # latents become heads before attention is called
            return False
        if reading == "auto" and not self.streams[0].has_kernel(key_states):
            return False
        new = key_states.shape[2]
        # The call itself quantizes candidates beyond the slack, after they are read.
        few = min(MOST_CANDIDATES, self.settings.slack)
        return (new == 1 or (self.record_past and new <= few)) and not torch.is_grad_enabled()

    def _pages(
        self, key_states: torch.Tensor, value_states: torch.Tensor, masks: MaskCheck
    ) -> Rows:
        """The keys and values of a decoding step, restored on demand, or now if all are exact."""
        is_quantized = any(stream.head for stream in self.streams)
        if not is_quantized or not all(stream.length for stream in self.streams):
            return self.read(0)
        columns = self.columns

        def restore() -> Rows:
            assert self.columns == columns, "rows of a step are read before the next one"
            return self.read(0)

        new = key_states.shape[2]
        step = DecodingStep(self.streams, self.starts, columns, new, restore, masks)
        return LazyRows(step, 0, key_states), LazyRows(step, 1, value_states)

    def read(self, first_column: int) -> Rows:
        reads = []
        for start, stream in zip(self.starts, self.streams, strict=True):
            reads.append(stream.read(max(0, first_column - start)))
        return self._side_by_side(reads, first_column)

    def _side_by_side(self, reads: Sequence[Rows], first_column: int) -> Rows:
        keys, values = zip(*reads, strict=True)
        width = self.columns - first_column
        return _join(keys, width), _join(values, width)

    def _exact_before(self, begin: int, new: int) -> int:
        """The first token past the sink that `new` tokens from `begin` on read exact."""
        layout = self.settings.layout
        if new == 1 or self.record_past:
            return begin + 1 - layout.recent
        return begin if layout.prefill_layout == "server" else begin - layout.recent

    @property
    def _slack(self) -> int:
        """How many tokens may be taken back."""
        return self.settings.slack if self.record_past else 0

    def _needed(self, length: int) -> int:
        """The first token that a call after `length` tokens reads."""
        return 0

    def get_seq_length(self) -> int:
        return self.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many columns a call of `query_length` tokens reads, and the first one."""
        first = self._needed(self.columns)
        return self.columns + query_length - first, first

    def get_max_length(self) -> int:
        return -1  # any number of tokens

    def activate_past_recording(self) -> None:
        """Keep `slack` more tokens exact from now on, which `crop` may take back."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens, given as a negative number. Raises `RotationZooError` if some
        are quantized, or if a sliding window would show tokens again that it forgot. Other tokens
        do not change: without recording, the recent window is shorter until it fills up again."""
        self.check_crop(tokens_to_remove)
        count = min(-tokens_to_remove, self.columns)
        for stream in self.streams:
            stream.crop(min(count, stream.length))
        self.columns -= count

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise `RotationZooError` as `crop` does, before anything changes."""
        if tokens_to_remove > 0:
            problem = f"crop takes a negative number of tokens, not {tokens_to_remove}"
            hint = "say how many tokens to take back: crop(-1) takes back the last one"
            raise RotationZooError(problem, hint)
        for stream in self.streams:
            count = min(-tokens_to_remove, stream.length)
            problem = f"{count} tokens cannot be taken back"
            hint = "make the cache with a greater slack, or read the prompt again"
            if count > stream.exact_tokens:
                reason = f"all but the last {stream.exact_tokens} are quantized"
                raise RotationZooError(f"{problem}: {reason}", hint)
            if self._needed(stream.length - count) < stream.first:
                reason = f"the window of layer {self.index} would reach tokens that it forgot"
                raise RotationZooError(f"{problem}: {reason}", hint)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Keep these rows `[B']`, in this order."""
        if not self.is_initialized:
            return
        numbers = beam_idx.tolist()
        # Most steps of a settled beam search move nothing.
        if numbers == list(range(self.batch)):
            return
        if len(self.streams) == 1:
            self.streams[0].select(beam_idx.to(self.device))
            return
        self.starts = [self.starts[number] for number in numbers]
        self.streams = [copy.deepcopy(self.streams[number]) for number in numbers]

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.reorder_cache(torch.arange(self.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.reorder_cache(torch.arange(self.batch)[indices.cpu()])

    def reset(self) -> None:
        self.record_past = False
        self._clear()

    @property
    def batch(self) -> int:
        return sum(stream.batch for stream in self.streams)

    @property
    def bf16_bytes(self) -> int:
        """The bytes in bfloat16 of the tokens that the next call reads."""
        tokens = self.columns - self._needed(self.columns)
        elements = self.streams[0].elements if self.streams else 0
        return 2 * self.batch * tokens * elements

    def tensors(self) -> Iterator[torch.Tensor]:
        return chain.from_iterable(stream.tensors() for stream in self.streams)


class RotatedSlidingLayer(RotatedLayer):
    """One layer with a sliding window or chunked attention, which forgets tokens no longer read."""

    is_sliding = True

    def __init__(self, settings: CacheSettings, index: int, padding: Padding, window: int):
        super().__init__(settings, index, padding)
        self.sliding_window = window

    def _needed(self, length: int) -> int:
        # The next token counts in its own window.
        return max(0, length - self.sliding_window + 1)

    def get_max_length(self) -> int:
        return self.sliding_window


class RotatedHybridLayer(LinearAttentionLayer, RotatedLayer):  # type: ignore[misc, override]
    """Full and linear attention in one layer: keys and values are stored in 2 bits, and states as
    in transformers. Each method serves both parts, as in transformers' own layer of this kind."""

    is_compileable = False

    def __init__(self, settings: CacheSettings, index: int, padding: Padding, states: int):
        RotatedLayer.__init__(self, settings, index, padding)
        LinearAttentionLayer.__init__(self, number_of_states=states)

    def lazy_initialization(self, *rows: Any, **states: Any) -> None:
        """Keys and values are given by position, states by name."""
        if rows:
            RotatedLayer.lazy_initialization(self, *rows)
        else:
            LinearAttentionLayer.lazy_initialization(self, **states)

    def reset(self) -> None:
        LinearAttentionLayer.reset(self)
        RotatedLayer.reset(self)

    def reorder_cache(self, beam_idx: Any) -> None:
        LinearAttentionLayer.reorder_cache(self, beam_idx)
        RotatedLayer.reorder_cache(self, beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        LinearAttentionLayer.crop(self, tokens_to_remove)
        RotatedLayer.crop(self, tokens_to_remove)


def states_of(layer: Any) -> Iterator[torch.Tensor]:
    """The states of a layer with linear attention, which a cache does not quantize."""
    if isinstance(layer, cache_utils.LinearAttentionCacheLayerMixin):
        for states in (layer.conv_states, layer.recurrent_states):
            yield from (state for state in states.values() if state is not None)


def _join(rows: Sequence[torch.Tensor], columns: int) -> torch.Tensor:
    """Rows `[B, H, T, D]` of different T as one batch, left-padded with zeros."""
    padded = []
    for stream_rows in rows:
        missing = columns - stream_rows.shape[2]
        if missing:
            stream_rows = torch.nn.functional.pad(stream_rows, (0, 0, missing, 0))
        padded.append(stream_rows)
    return padded[0] if len(padded) == 1 else torch.cat(padded)
