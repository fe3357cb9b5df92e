"""A model's attention, made to read pages while it runs with a cache that hands them over.

transformers looks its attention function up by name in a registry (see `model.capture`). A hook of
the model puts one in its place that knows `LazyRows`, and another takes it away when the call ends.
Keys and values of other caches go to the model's own function.
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
from rotationzoo.model.capture import (
    AttentionFunction,
    attention_registries,
    decoder,
    eager_attention,
)

_OPTIONS = {
    *("module", "query", "key", "value", "attention_mask"),
    *("scaling", "dropout", "softcap", "s_aux", "sliding_window", "is_causal", "kwargs"),
}
"""Parameters of an attention function whose meaning is known here."""
_lock = threading.Lock()
_swaps: dict[tuple[int, str], "_Swap"] = {}
_registries: WeakKeyDictionary[PreTrainedModel, list[AttentionInterface]] = WeakKeyDictionary()


@dataclass
class PageReading:
    """Whether the layers of a cache may hand over pages. All of them share it."""

    wanted: bool
    masks: MaskCheck = field(default_factory=MaskCheck)
    swaps: list["_Swap"] = field(default_factory=list)
    """The functions in place while the model runs with this cache."""

    @property
    def is_open(self) -> bool:
        """Whether the model that is running has an attention that reads pages."""
        return bool(self.swaps)


@dataclass(eq=False)
class _Swap:
    """One entry of a registry, replaced for as long as any cache wants it."""

    registry: AttentionInterface
    name: str
    original: AttentionFunction | None
    users: int = 0


def watch_attention(model: PreTrainedModel) -> None:
    """Make a model's attention read pages each time that it runs with a cache that wants it."""
    if _open not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_open, with_kwargs=True)
        model.register_forward_hook(_close, with_kwargs=True, always_call=True)


def _open(model: Any, args: Any, kwargs: dict[str, Any]) -> None:
    reading = _reading_of(kwargs)
    if reading is None or reading.is_open or _returns_weights(model, kwargs):
        return
    tower = decoder(model)
    name = tower.config._attn_implementation
    if model not in _registries:
        _registries[model] = attention_registries(tower)
    with _lock:
        entries = [_entry(registry, name) for registry in _registries[model]]
        if all(_is_known(entry) for entry in entries):
            for entry in entries:
                _put_in_place(entry)
            reading.swaps = entries


def _close(model: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    reading = _reading_of(kwargs)
    if reading is None:
        return
    with _lock:
        for entry in reading.swaps:
            _take_away(entry)
        reading.swaps = []
    reading.masks.mask = None


def _reading_of(kwargs: Mapping[str, Any]) -> PageReading | None:
    reading = getattr(kwargs.get("past_key_values"), "page_reading", None)
    return reading if isinstance(reading, PageReading) and reading.wanted else None


def _returns_weights(model: PreTrainedModel, kwargs: Mapping[str, Any]) -> bool:
    """Whether the caller asks for attention weights, which need rows."""
    default = getattr(model.config.get_text_config(decoder=True), "output_attentions", False)
    return bool(kwargs.get("output_attentions", default))


def _entry(registry: AttentionInterface, name: str) -> _Swap:
    """The entry of a registry, whether it is replaced yet or not."""
    return _swaps.get((id(registry), name)) or _Swap(registry, name, registry.get(name))


def _is_known(entry: _Swap) -> bool:
    """Whether the entry is an attention function that is known here. Others may do anything: they
    may be those of a capture or a simulation."""
    if entry.original is None:
        return entry.name == "eager"
    return entry.original in (sdpa_attention_forward, flash_attention_forward)


def _put_in_place(entry: _Swap) -> None:
    if not entry.users:
        _swaps[id(entry.registry), entry.name] = entry
        entry.registry[entry.name] = reader_of_pages(entry.original)
    entry.users += 1


def _take_away(entry: _Swap) -> None:
    entry.users -= 1
    if not entry.users:
        del _swaps[id(entry.registry), entry.name]
        entry.registry.pop(entry.name)  # uncovers the library's own entry ...
        if entry.registry.get(entry.name) is not entry.original:
            entry.registry[entry.name] = entry.original  # ... or puts back an override


def reader_of_pages(original: AttentionFunction | None) -> AttentionFunction:
    """An attention function that takes a step's pages, and leaves all else to the model's own."""

    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> tuple[torch.Tensor, Any]:
        models_own = original or eager_attention(module)
        if not isinstance(key, LazyRows) or not isinstance(value, LazyRows):
            return models_own(module, query, key, value, attention_mask, **options)
        step = key.step
        scores = _scores(models_own, query, options)
        # Rows that were restored already cost nothing more, and a model that asked for them may
        # have made a mask of them.
        if attention_mask is not None:
            is_plain = step.masks.passes(attention_mask, step)
        else:
            # Other functions do not hide the later ones of several tokens by themselves.
            is_plain = step.new == 1 or original is flash_attention_forward
        if scores is None or step.is_restored or not is_plain:
            keys, values = key.step.rows[0], value.step.rows[1]
            return models_own(module, query, keys, values, attention_mask, **options)
        return step.attend(query, scores).transpose(1, 2).contiguous(), None

    return attend


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
