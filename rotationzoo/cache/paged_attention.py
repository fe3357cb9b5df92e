"""A model's attention, made to read pages while it runs with a cache that hands them over.

transformers looks its attention function up by name in a registry (see `model.capture`). A hook of
the model puts a `PageReader` there, which attends over `LazyRows` and passes everything else to the
original function, so that other caches and models do not change.
"""

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils._pytree import tree_map
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rotationzoo.cache.stream import Rows, Stream
from rotationzoo.codec.attention import Scores
from rotationzoo.model import capture
from rotationzoo.model.capture import AttentionFunction, given_cache

# ---- a decoding step


MOST_CANDIDATES = 16
"""The most new tokens of a step that reads pages. More read restored rows, like a prompt."""


@dataclass
class MaskCheck:
    """Whether a mask hides only padding and later tokens. All layers share this, because each check
    waits for the GPU."""

    mask: torch.Tensor | None = None
    passed: bool = False

    def passes(self, mask: torch.Tensor, step: "DecodingStep") -> bool:
        """Check the mask of a step: `[B, columns]`, or `[B, H, T, columns]`, boolean (True = read)
        or additive. B and H may be 1."""
        if mask is not self.mask:
            self.mask, self.passed = mask, _hides_only_padding(mask, step)
        return self.passed


@dataclass(eq=False)
class DecodingStep:
    """The tokens that the new tokens of a call read in one layer, until the next call."""

    streams: Sequence[Stream]
    starts: Sequence[int]
    """The column at which the rows of each stream begin."""
    columns: int
    """Columns with padding and the new tokens."""
    new: int
    """How many of the last tokens are new."""
    restore: Callable[[], Rows]
    """Restores the keys and values of all columns."""
    masks: MaskCheck = field(default_factory=MaskCheck)

    @cached_property
    def rows(self) -> Rows:
        """The keys and values `[B, H, columns, D]`, in the model's frame."""
        return self.restore()

    @property
    def is_restored(self) -> bool:
        """Whether something has asked for the rows."""
        return "rows" in self.__dict__

    def attend(self, query: torch.Tensor, scores: Scores) -> torch.Tensor:
        """The attention output `[B, H_q, T, D_v]` of the new tokens' queries `[B, H_q, T, D]`."""
        if len(self.streams) == 1:
            return self.streams[0].attend(query, scores)
        pairs = zip(self.streams, query.split(1), strict=True)
        return torch.cat([stream.attend(part, scores) for stream, part in pairs])


class LazyRows(torch.Tensor):
    """The keys or the values of a step, with the shape, type and device of the restored rows.

    Attention that reads pages takes the `step`. Any other operation of torch gets the restored
    rows, so a model may do more with its keys and values than attend over them.
    """

    step: DecodingStep
    side: int
    # Only operations that reach the dispatcher read numbers.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, step: DecodingStep, side: int, like: torch.Tensor) -> "LazyRows":
        """The keys (side 0) or values (1) of a step, with new rows like these `[B, H, T, D]`."""
        batch, heads, _, dim = like.shape
        shape = batch, heads, step.columns, dim
        lazy: LazyRows = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=like.dtype, device=like.device
        )
        lazy.step, lazy.side = step, side
        return lazy

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*tree_map(_rows, args), **tree_map(_rows, kwargs or {}))


def _hides_only_padding(mask: torch.Tensor, step: DecodingStep) -> bool:
    if not isinstance(mask, torch.Tensor) or mask.shape[-1] != step.columns:
        return False
    column = torch.arange(step.columns, device=mask.device)
    shown = column >= torch.tensor(step.starts, device=mask.device)[:, None]
    if mask.ndim == 4:
        last = column[-step.new :, None]
        shown = shown[:, None, None] & (column <= last)
    if not mask.is_floating_point():
        return bool((mask.bool() == shown).all())
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    return bool(torch.where(shown, mask == 0, hidden).all())


def _rows(argument: Any) -> Any:
    return argument.step.rows[argument.side] if isinstance(argument, LazyRows) else argument


# ---- attention


_OPTIONS = {
    *("module", "query", "key", "value", "attention_mask"),
    *("scaling", "dropout", "softcap", "s_aux", "sliding_window", "is_causal", "kwargs"),
}
"""Parameters of an attention function that a `PageReader` understands."""
_LIBRARY = AttentionInterface()  # without entries, so that it shows the library's
_lock = threading.Lock()
_registries: WeakKeyDictionary[PreTrainedModel, list[AttentionInterface]] = WeakKeyDictionary()


@dataclass
class PageReading:
    """Whether the layers of a cache may hand over pages, shared by all layers."""

    wanted: bool
    masks: MaskCheck = field(default_factory=MaskCheck)
    readers: list["PageReader"] = field(default_factory=list)
    """The functions that read the pages, while a model runs with this cache and can read pages."""


@dataclass(eq=False)
class PageReader:
    """An attention function under a name in use, which reads pages or calls the original one."""

    registry: AttentionInterface
    name: str
    calls: int = 0
    """Running calls of models that need it."""

    @property
    def original(self) -> AttentionFunction | None:
        """The library's function of this name; None for `eager`, which each model defines."""
        return _LIBRARY.get(self.name)

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> tuple[torch.Tensor, Any]:
        """Attend, with the arguments of an attention function of transformers."""
        models_own = self.original or capture.eager_attention(module)
        if not isinstance(key, LazyRows) or not isinstance(value, LazyRows):
            return models_own(module, query, key, value, attention_mask, **options)
        step = key.step
        scores = _scores(models_own, query, options)
        if attention_mask is not None:
            is_plain = step.masks.passes(attention_mask, step)
        else:
            # Other functions do not hide later ones of several new tokens by themselves.
            is_plain = step.new == 1 or models_own is flash_attention_forward
        # Restored rows cost nothing more, and the model may have computed a mask from them.
        if scores is None or step.is_restored or not is_plain:
            keys, values = key.step.rows[0], value.step.rows[1]
            return models_own(module, query, keys, values, attention_mask, **options)
        return step.attend(query, scores).transpose(1, 2).contiguous(), None


def watch_attention(model: PreTrainedModel) -> None:
    """Make a model's attention read pages each time it runs with a cache that wants it."""
    if _open not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_open, with_kwargs=True)
        model.register_forward_hook(_close, with_kwargs=True, always_call=True)


def _open(model: Any, args: Any, kwargs: dict[str, Any]) -> None:
    reading = _reading_of(kwargs)
    if reading is None or reading.readers or _returns_weights(model, kwargs):
        return
    tower = capture.decoder(model)
    if model not in _registries:
        _registries[model] = capture.attention_registries(tower)
    with _lock:
        readers = []
        for registry in _registries[model]:
            if (reader := _reader(registry, tower.config._attn_implementation)) is None:
                return
            readers.append(reader)
        for reader in readers:
            reader.registry[reader.name] = reader
            reader.calls += 1
        reading.readers = readers


def _close(model: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    reading = _reading_of(kwargs)
    if reading is None:
        return
    with _lock:
        for reader in reading.readers:
            reader.calls -= 1
            # Only `eager` may go, which models do not look up. Other threads look for other names.
            is_in_place = reader.registry.get("eager") is reader
            if not reader.calls and reader.name == "eager" and is_in_place:
                del reader.registry["eager"]
        reading.readers = []
    reading.masks.mask = None


def _reading_of(kwargs: Mapping[str, Any]) -> PageReading | None:
    reading = getattr(given_cache(kwargs), "page_reading", None)
    return reading if isinstance(reading, PageReading) and reading.wanted else None


def _returns_weights(model: PreTrainedModel, kwargs: Mapping[str, Any]) -> bool:
    """Whether the caller asks for attention weights, which need restored rows."""
    default = getattr(model.config.get_text_config(decoder=True), "output_attentions", False)
    return bool(kwargs.get("output_attentions", default))


def _reader(registry: AttentionInterface, name: str) -> PageReader | None:
    """The reader under this name; None if its function is not the library's, as in a capture."""
    entry = registry.get(name)
    reader = entry if isinstance(entry, PageReader) else PageReader(registry, name)
    if entry is not reader and entry is not reader.original:
        return None
    known = reader.original in (sdpa_attention_forward, flash_attention_forward)
    return reader if known or name == "eager" else None


def _scores(
    function: AttentionFunction, query: torch.Tensor, options: Mapping[str, Any]
) -> Scores | None:
    """How this call computes logits; None if `Scores` cannot express it."""
    further = [options.get(name) for name in _further_options(function)]
    further += [options.get("dropout") or None, options.get("sliding_window")]
    if any(option is not None for option in further):
        return None
    scaling = options.get("scaling")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return Scores(scale, options.get("softcap"), options.get("s_aux"))


@cache
def _further_options(function: AttentionFunction) -> set[str]:
    return inspect.signature(function).parameters.keys() - _OPTIONS
