"""Post-RoPE queries, keys, values and the attention output of every layer, read where the model
computes attention.

transformers calls one function per attention layer, after RoPE, norms and the cache update, looked
up by name in a registry. `intercept` swaps that entry under the name the model already uses: a new
name would lose the mask function registered beside it and the sparse masks that some models apply
only under the names they know.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import align_module_device
from transformers import AttentionInterface, PreTrainedModel

from rotationzoo.errors import UnsupportedModel


@dataclass(frozen=True)
class Attention:
    """The model's own attention call, with its mask and options; call it to get the output `[B, T,
    H_q, D_v]`.

    `mask` is what the implementation takes: None for plain causal, boolean (True = attend) or
    additive.
    """

    module: torch.nn.Module
    function: Callable[..., tuple[torch.Tensor, Any]]
    mask: torch.Tensor | None
    options: dict[str, Any]

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output, _ = self.function(self.module, query, key, value, self.mask, **self.options)
        return output

    def weights(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """The softmax `[B, H_q, T_q, T_k]` of this call in float32, with the model's own soft cap
        and sinks: what its eager implementation returns. Needs an additive mask. Raises
        `UnsupportedModel` where there is none."""
        try:
            eager = eager_attention(self.module)
        except AttributeError as error:
            raise UnsupportedModel(
                f"{type(self.module).__name__} has no eager attention to read weights from",
                hint="add: --queries 0",
            ) from error
        query, key = query.float(), key.float()
        with loaded(self.module):
            return eager(self.module, query, key, key[..., :1], self.mask, **self.options)[1]


@contextmanager
def loaded(module: torch.nn.Module) -> Iterator[None]:
    """Within the block the module's own parameters are there, such as sinks of attention, which
    accelerate may keep elsewhere but while the module runs."""
    if not any(parameter.is_meta for parameter in module.parameters(recurse=False)):
        yield  # while it runs: its parameters stay when the block ends
        return
    with align_module_device(module):
        yield


def eager_attention(module: torch.nn.Module) -> Callable[..., tuple[torch.Tensor, Any]]:
    """The eager implementation: in no registry, each modeling file has its own, to which the
    registry lookup falls back."""
    return sys.modules[type(module).__module__].eager_attention_forward


Intercept = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, Attention], torch.Tensor]
Observe = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


def decoder(model: PreTrainedModel) -> PreTrainedModel:
    """The text decoder without its language-model head and, in a vision model, without the other
    towers."""
    inner = model.get_decoder()
    # Some models name another part "decoder"; some have none and are their own.
    base = model.base_model
    assert isinstance(base, PreTrainedModel)
    return inner if isinstance(inner, PreTrainedModel) and inner is not model else base


@contextmanager
def intercept(model: PreTrainedModel, function: Intercept) -> Iterator[None]:
    """Within the block, every attention call of the model's decoder becomes `function(layer, query,
    key, value, attend)`.

    `query` is `[B, H_q, T, D_k]`, `key` and `value` `[B, H_kv, T, D]`, all post-RoPE and not
    repeated for GQA; `attend` is the call the model would have made and `function` returns what it
    returns. Attention of other modules (vision towers, other models) is untouched. The registry is
    restored when the block ends, also by an exception.
    """
    tower = decoder(model)
    own = set(map(id, tower.modules()))
    name = tower.config._attn_implementation
    swapped: list[tuple[AttentionInterface, Any]] = []

    def replacement(original: Callable[..., Any] | None) -> Callable[..., Any]:
        def call(module, query, key, value, attention_mask, **options):
            real = original or eager_attention(module)
            if id(module) not in own:
                return real(module, query, key, value, attention_mask, **options)
            attend = Attention(module, real, attention_mask, options)
            return function(module.layer_idx, query, key, value, attend), None

        return call

    try:
        for registry in _registries(tower):
            original = registry.get(name)
            swapped.append((registry, original))
            registry[name] = replacement(original)
        yield
    finally:
        for registry, original in swapped:
            registry.pop(name, None)  # uncovers the library's own entry ...
            if registry.get(name) is not original:
                registry[name] = original  # ... or puts back an override that was there before


@contextmanager
def capture(model: PreTrainedModel, observe: Observe) -> Iterator[None]:
    """Within the block, `observe(layer, query, key, value, output)` sees every attention call of
    the decoder.

    Shapes as in `intercept`; `output` is `S V` per query head, `[B, H_q, T, D_v]`. The model
    computes what it always does.
    """

    def watch(
        layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attend: Attention
    ) -> torch.Tensor:
        output = attend(query, key, value)
        observe(layer, query, key, value, output.transpose(1, 2))
        return output

    with intercept(model, watch):
        yield


def check_transparent(model: PreTrainedModel, ids: torch.Tensor) -> None:
    """Raise `UnsupportedModel` unless the logits of `ids` `[B, T]` are the same with and without
    capture.

    On a GPU, where a kernel may not repeat itself, they may differ as much as two plain runs do.
    """

    def logits() -> torch.Tensor:
        return model(input_ids=ids, use_cache=False).logits

    plain = logits()
    with capture(model, lambda *_: None):
        captured = logits()
    if torch.allclose(plain, captured, rtol=0, atol=0, equal_nan=True):
        return
    change = (plain - captured).abs().max().item()
    noise = (plain - logits()).abs().max().item()
    if not change <= noise:
        raise UnsupportedModel(
            f"capturing attention changes what {type(model).__name__} computes (logits move by {change:.1e})",
            hint="report the model and the transformers version as an issue; its statistics would not be trustworthy",
        )


def _registries(tower: PreTrainedModel) -> list[AttentionInterface]:
    """Every attention registry that the tower's modeling files use: nearly always the library's,
    some have their own."""
    homes = (sys.modules[type(module).__module__] for module in tower.modules())
    found = (getattr(home, "ALL_ATTENTION_FUNCTIONS", None) for home in homes)
    return list({id(r): r for r in found if isinstance(r, AttentionInterface)}.values())
