"""The attention hook, which reads post-RoPE queries, keys, values and outputs of every layer.

`intercept` swaps transformers' attention function under the model's own name: a new name would lose
its mask function, and sparse masks that some models apply only under known names."""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from rotationzoo.errors import UnsupportedModel
from rotationzoo.model.long_masks import LongMask, long_masks, query_blocks, registered, seen_keys

if TYPE_CHECKING:
    from transformers import AttentionInterface, PreTrainedModel

_TAKES_LONG_MASKS = "takes_long_masks"

AttentionFunction = Callable[..., tuple[torch.Tensor, Any]]
"""`(module, query, key, value, mask, **options)` -> output `[B, T, H_q, D_v]`, weights or None."""


@dataclass(frozen=True)
class Attention:
    """The model's own attention call of one layer, which returns the output `[B, T, H_q, D_v]`.
    `mask` is None for plain causal, boolean (True = attend), additive, or a `LongMask`."""

    module: torch.nn.Module
    function: AttentionFunction
    mask: torch.Tensor | LongMask | None
    options: dict[str, Any]
    latent: torch.Tensor | None = None
    """The latents `[B, 1, T, R]` that `kv_b_proj` projects to the keys and values, if any."""

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        # An outer `intercept` of the same model takes the whole call.
        if isinstance(self.mask, LongMask) and not hasattr(self.function, _TAKES_LONG_MASKS):
            return self._in_blocks(self.mask, query, key, value)
        output, _ = self.function(self.module, query, key, value, self.mask, **self.options)
        return output

    def _in_blocks(
        self, mask: LongMask, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """The same output, computed for a block of queries at a time from the keys they see."""
        mask.check(query.shape[2], key.shape[2], self.module)
        outputs = []
        for queries in query_blocks(query.shape[2]):
            rows = mask.rows(queries)
            seen = seen_keys(rows)
            read = replace(self, mask=rows[..., seen])
            outputs.append(read(query[:, :, queries], key[:, :, seen], value[:, :, seen]))
        return torch.cat(outputs, dim=1)


@dataclass(frozen=True)
class Call:
    """One layer's attention call. The tensors are post-RoPE, not repeated for GQA, in the model's
    dtype and on the layer's device. They belong to the model: change none, and copy to keep."""

    layer: int
    query: torch.Tensor  # `[B, H_q, T, D_k]`
    key: torch.Tensor  # `[B, H_kv, T_k, D_k]`
    value: torch.Tensor  # `[B, H_kv, T_k, D_v]`
    attend: Attention

    def run(self) -> torch.Tensor:
        """The output `[B, T, H_q, D_v]`."""
        return self.attend(self.query, self.key, self.value)


Intercept = Callable[[Call], torch.Tensor]
"""Runs instead of a layer's attention and returns the output `[B, T, H_q, D_v]`."""
Observe = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""`(layer, query, key, value, output)`: gets the tensors of a call, output `[B, H_q, T, D_v]`."""


@contextmanager
def intercept(model: "PreTrainedModel", function: Intercept) -> Iterator[None]:
    """Inside the block, `function` gets the decoder's attention calls, but none of other towers."""
    tower = decoder(model)
    decoder_modules = set(map(id, tower.modules()))
    name = tower.config._attn_implementation
    latents: dict[int, torch.Tensor] = {}

    def replacement(original: AttentionFunction | None) -> AttentionFunction:
        def call(
            module: torch.nn.Module,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: torch.Tensor | LongMask | None,
            **options: Any,
        ) -> tuple[torch.Tensor, Any]:
            models_own = original or eager_attention(module)  # eager is in no registry
            if id(module) not in decoder_modules:
                if isinstance(attention_mask, LongMask):
                    attention_mask = attention_mask.rows(slice(None))
                return models_own(module, query, key, value, attention_mask, **options)
            latent = latents.pop(id(module), None)
            attend = Attention(module, models_own, attention_mask, options, latent)
            layer: Any = module.layer_idx
            return function(Call(layer, query, key, value, attend)), None

        setattr(call, _TAKES_LONG_MASKS, True)
        return call

    with ExitStack() as swapped:
        for registry in attention_registries(tower):
            swapped.enter_context(registered(registry, name, replacement(registry.get(name))))
        swapped.enter_context(_watching_latents(tower, latents))
        swapped.enter_context(long_masks(name))
        yield


def _watching_latents(tower: "PreTrainedModel", latents: dict[int, torch.Tensor]) -> ExitStack:
    """Store the inputs of each attention module's `kv_b_proj` by the module's id."""

    def note(attention: int, projection: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        latents[attention] = inputs[0].unsqueeze(1) if inputs[0].ndim == 3 else inputs[0]

    hooks = ExitStack()
    for module in tower.modules():
        projection = getattr(module, "kv_b_proj", None)
        if isinstance(projection, torch.nn.Module):
            hooks.enter_context(projection.register_forward_pre_hook(partial(note, id(module))))
    return hooks


@contextmanager
def capture(model: "PreTrainedModel", observe: Observe) -> Iterator[None]:
    """Inside the block, `observe` sees every attention call of the decoder; nothing changes."""

    def watch(call: Call) -> torch.Tensor:
        output = call.run()
        observe(call.layer, call.query, call.key, call.value, output.transpose(1, 2))
        return output

    with intercept(model, watch):
        yield


def decoder(model: "PreTrainedModel") -> "PreTrainedModel":
    """The text decoder, without its language-model head or the other towers of a vision model."""
    from transformers import PreTrainedModel

    untyped: Any = model
    inner = untyped.get_decoder()
    if isinstance(inner, PreTrainedModel) and inner is not model:
        return inner
    # Some models call another part "decoder", and others are the decoder themselves.
    base = model.base_model
    if base is model:  # the class may have the prefix of another class (Llama 4)
        base = getattr(model, "model", model)
    assert isinstance(base, PreTrainedModel)
    return base


def eager_attention(module: torch.nn.Module) -> AttentionFunction:
    """A module's eager implementation, which its modeling file defines. Raises `AttributeError`."""
    return cast(AttentionFunction, sys.modules[type(module).__module__].eager_attention_forward)


def attention_registries(tower: "PreTrainedModel") -> list["AttentionInterface"]:
    """Every attention registry that the tower's modeling files use: the library's or their own."""
    from transformers import AttentionInterface

    files = dict.fromkeys(sys.modules[type(module).__module__] for module in tower.modules())
    registries = [getattr(file, "ALL_ATTENTION_FUNCTIONS", None) for file in files]
    # By identity, because registries with the same entries compare equal.
    unique = {id(each): each for each in registries if isinstance(each, AttentionInterface)}
    return list(unique.values())


def check_transparent(model: "PreTrainedModel", ids: torch.Tensor) -> torch.Tensor:
    """The logits `[B, T, vocabulary]`. Raises `UnsupportedModel` if capture changes them."""

    def logits() -> torch.Tensor:
        return cast(torch.Tensor, model(input_ids=ids, use_cache=False).logits)

    plain = logits()
    with intercept(model, Call.run):
        captured = logits()
    if torch.allclose(plain, captured, rtol=0, atol=0, equal_nan=True):
        return plain
    change = (plain - captured).abs().max().item()
    noise = (plain - logits()).abs().max().item()
    if not change <= noise:
        what = f"what {type(model).__name__} computes (logits move by {change:.1e})"
        hint = "report the model and the transformers version: its statistics would be wrong"
        raise UnsupportedModel(f"capturing attention changes {what}", hint)
    return plain


# ---- the two names of a model's cache: `past_key_values`, and from transformers 5.24 on `cache`


def cache_argument(model: Any, cache: Any) -> dict[str, Any]:
    """The keyword argument for a cache in the call of a model and its `generate`."""
    is_new = "cache" in inspect.signature(model.forward).parameters
    return {"cache" if is_new else "past_key_values": cache}


def given_cache(arguments: Mapping[str, Any]) -> Any:
    """The cache among the named arguments of a model's call, whose name the caller chose."""
    return arguments.get("cache", arguments.get("past_key_values"))


def returned_cache(output: Any) -> Any:
    """The cache that a model returned; None if it returned none."""
    # The old name warns where there is a new one.
    name = "cache" if hasattr(output, "cache") else "past_key_values"
    return getattr(output, name, None)
