"""A model's attention, made to read pages while it runs with a cache that hands them over.

transformers looks its attention function up by name in a registry (see `model.capture`). A hook of
the model puts a `PageReader` there, which knows `LazyRows`, and passes everything else on to the
function that was there: other caches and other models do not notice.
"""

import inspect
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rotationzoo.cache.decoding_step import LazyRows, MaskCheck
from rotationzoo.codec.attention import Scores
from rotationzoo.model import capture
from rotationzoo.model.capture import AttentionFunction, given_cache

_OPTIONS = {
    *("module", "query", "key", "value", "attention_mask"),
    *("scaling", "dropout", "softcap", "s_aux", "sliding_window", "is_causal", "kwargs"),
}
"""Parameters of an attention function whose meaning is known here."""
_LIBRARY = AttentionInterface()  # holds no entry of its own, and so shows the library's
_lock = threading.Lock()
_registries: WeakKeyDictionary[PreTrainedModel, list[AttentionInterface]] = WeakKeyDictionary()


@dataclass
class PageReading:
    """Whether the layers of a cache may hand over pages. All of them share it."""

    wanted: bool
    masks: MaskCheck = field(default_factory=MaskCheck)
    readers: list["PageReader"] = field(default_factory=list)
    """The functions that take the pages while the model runs with this cache."""

    @property
    def is_open(self) -> bool:
        """Whether the model that is running has an attention that reads pages."""
        return bool(self.readers)


@dataclass(eq=False)
class PageReader:
    """An attention function under a name that models use already. It takes the pages of a step, and
    leaves all else to the function of that name."""

    registry: AttentionInterface
    name: str
    calls: int = 0
    """How many calls of models need it now."""

    @property
    def original(self) -> AttentionFunction | None:
        """The library's function of this name; None for `eager`, which each model has itself."""
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
            # Other functions do not hide the later ones of several tokens by themselves.
            is_plain = step.new == 1 or models_own is flash_attention_forward
        # Rows that were restored already cost nothing more, and a model that asked for them may
        # have made a mask of them.
        if scores is None or step.is_restored or not is_plain:
            keys, values = key.step.rows[0], value.step.rows[1]
            return models_own(module, query, keys, values, attention_mask, **options)
        return step.attend(query, scores).transpose(1, 2).contiguous(), None

    def begin_call(self) -> None:
        """Put it in place."""
        self.registry[self.name] = self
        self.calls += 1

    def end_call(self) -> None:
        """Take it away, if it may be.

        A name that the library has stays: while one thread takes it away, the registry would tell
        another that there is no such attention. Models do not ask for `eager` in this way.
        """
        self.calls -= 1
        if not self.calls and self.name == "eager" and self.registry.get("eager") is self:
            del self.registry["eager"]


def watch_attention(model: PreTrainedModel) -> None:
    """Make a model's attention read pages each time that it runs with a cache that wants it."""
    if _open not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_open, with_kwargs=True)
        model.register_forward_hook(_close, with_kwargs=True, always_call=True)


def _open(model: Any, args: Any, kwargs: dict[str, Any]) -> None:
    reading = _reading_of(kwargs)
    if reading is None or reading.is_open or _returns_weights(model, kwargs):
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
            reader.begin_call()
        reading.readers = readers


def _close(model: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    reading = _reading_of(kwargs)
    if reading is None:
        return
    with _lock:
        for reader in reading.readers:
            reader.end_call()
        reading.readers = []
    reading.masks.mask = None


def _reading_of(kwargs: Mapping[str, Any]) -> PageReading | None:
    reading = getattr(given_cache(kwargs), "page_reading", None)
    return reading if isinstance(reading, PageReading) and reading.wanted else None


def _returns_weights(model: PreTrainedModel, kwargs: Mapping[str, Any]) -> bool:
    """Whether the caller asks for attention weights, which need rows."""
    default = getattr(model.config.get_text_config(decoder=True), "output_attentions", False)
    return bool(kwargs.get("output_attentions", default))


def _reader(registry: AttentionInterface, name: str) -> PageReader | None:
    """The reader of pages under this name; None where the function of this name may do anything,
    as a capture's or a simulation's does."""
    entry = registry.get(name)
    reader = entry if isinstance(entry, PageReader) else PageReader(registry, name)
    if entry is not reader and entry is not reader.original:
        return None
    known = reader.original in (sdpa_attention_forward, flash_attention_forward)
    return reader if known or name == "eager" else None


def _scores(
    function: AttentionFunction, query: torch.Tensor, options: Mapping[str, Any]
) -> Scores | None:
    """How this call makes logits; None where it does more than `Scores` can say."""
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
