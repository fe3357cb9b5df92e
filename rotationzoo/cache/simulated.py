"""A model that reads its keys and values from a quantized cache, simulated in one forward pass.

A server keeps the first `sink` and the last `recent` tokens of a request exact. Queries soon after
a position therefore read it exact, and later queries read it quantized. To simulate this in one
pass over whole rows, the model's own attention function is called on keys and values
`[exact; quantized]` of twice the length. A mask shows each query one of the two copies of each
position (see `masks`). The model's own sliding windows, soft cap and attention sinks still apply.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from rotationzoo.cache.divergence import divergence
from rotationzoo.cache.masks import TwoCopyMask, TwoCopyMasks, as_additive
from rotationzoo.cache.protocol import CacheArm
from rotationzoo.cache.quantized_rows import QuantizedRows
from rotationzoo.cache.windows import Cache
from rotationzoo.model.capture import Attention, intercept
from rotationzoo.model.geometry import Geometry

SCORES = 2**26
"""Attention scores that are compared at a time: 256 MB, and several times that in float64."""

Observe = Callable[[int, torch.Tensor, torch.Tensor], None]
"""`(layer, output, exact)`: the attention block's output `[B, T, hidden]` after the output
projection, simulated and exact. Both are computed from the same input."""
ObserveKL = Callable[[int, torch.Tensor, torch.Tensor], None]
"""`(layer, divergence, positions)`: KL divergence `[B, Q]` of the attention of the queries at these
positions, averaged over heads."""


@dataclass(frozen=True)
class Simulation:
    """A model that reads its keys and values as one arm stores them, through one cache."""

    arm: CacheArm
    cache: Cache
    geometry: Geometry
    layers: set[int]
    """Layers that read their cache in 2 bits; the others read it exact."""
    sides: tuple[str, ...] = ("key", "value")
    """The sides of those layers that are stored in 2 bits."""
    queries: torch.Tensor | None = None
    """Positions `[Q]` of the queries whose attention is compared; None skips the comparison."""

    @contextmanager
    def running(
        self,
        model: PreTrainedModel,
        modules: Mapping[int, torch.nn.Module] | None = None,
        observe: Observe = lambda *_: None,
        observe_kl: ObserveKL = lambda *_: None,
    ) -> Iterator[None]:
        """Make the model read its cache through the codec while the context is open.

        1. Every attention call of a simulated layer goes to `_SimulatedAttention`. It builds both
           copies of keys and values, reports the KL divergence of the attention, and returns the
           output from the 2-bit cache.
        2. After each observed attention module, a `_BlockComparison` runs the module again on the
           same input with the simulation switched off, and hands both outputs to `observe`.

        Parameters:

        * `modules`: layer index -> attention module, for the modules whose outputs are observed;
        * `observe`: receives the simulated and the exact output of each of these modules;
        * `observe_kl`: receives the KL divergence of the selected queries' attention in every
          simulated layer.
        """
        attention = _SimulatedAttention(self, observe_kl)
        hooks = []
        for layer, module in (modules or {}).items():
            if layer in self.layers:
                comparison = _BlockComparison(layer, attention, observe)
                hooks.append(module.register_forward_hook(comparison, with_kwargs=True))
        try:
            with intercept(model, attention):
                yield
        finally:
            for hook in hooks:
                hook.remove()


class _SimulatedAttention:
    """Stands in for the model's attention function while a simulation runs."""

    def __init__(self, simulation: Simulation, observe_kl: ObserveKL):
        self.simulation = simulation
        self.observe_kl = observe_kl
        self.owners = {layer.index: layer.owner for layer in simulation.geometry}
        token_group = simulation.arm.token_group
        self.masks = TwoCopyMasks(replace(simulation.cache, token_group=token_group))
        self.quantized = QuantizedRows(simulation.arm, simulation.cache.format)
        self.switched_off = False

    @contextmanager
    def off(self) -> Iterator[None]:
        """Call the model's own attention unchanged while the context is open."""
        self.switched_off = True
        try:
            yield
        finally:
            self.switched_off = False

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attend: Attention,
    ) -> torch.Tensor:
        """The attention output `[B, T, H_q, D_v]`. The arguments are those that `intercept`
        passes."""
        if self.switched_off or layer not in self.simulation.layers:
            return attend(query, key, value)
        decoding = query.shape[2] < key.shape[2]
        keys = self._both_copies(key, self.owners[layer], "key", decoding)
        values = self._both_copies(value, self.owners[layer], "value", decoding)
        mask = self.masks.mask_for(attend, query, key.shape[2])
        queries = self.simulation.queries
        if queries is not None:
            kl = _attention_kl(attend, query, key, keys, mask, queries)
            self.observe_kl(layer, kl, queries)
        outputs = []
        # Each block of queries reads only the positions that it sees.
        for block in mask.blocks():
            read = replace(attend, mask=block.mask)
            seen_keys, seen_values = keys[:, :, block.seen], values[:, :, block.seen]
            outputs.append(read(query[:, :, block.queries], seen_keys, seen_values))
        return torch.cat(outputs, dim=1)

    def _both_copies(
        self, rows: torch.Tensor, owner: int, side: str, decoding: bool
    ) -> torch.Tensor:
        """Keys or values `[exact; quantized]` of twice the length, rotated as the layer that owns
        the cache stores them."""
        if side not in self.simulation.sides:
            # Both copies are exact, but the mask still expects two.
            return torch.cat([rows, rows], dim=2)
        arm, cache = self.simulation.arm, self.simulation.cache
        exact = arm.keep_exact(rows, owner, side)
        # No query reads a quantized sink token, and groups of tokens begin after the sink.
        sink, past = exact[:, :, : cache.sink], rows[:, :, cache.sink :]
        quantized = self.quantized.quantize(past, owner, side, decoding)
        return torch.cat([exact, sink, quantized], dim=2)


class _BlockComparison:
    """A forward hook that runs an attention module again on the same input with an exact cache."""

    def __init__(self, layer: int, attention: _SimulatedAttention, observe: Observe):
        self.layer, self.attention, self.observe = layer, attention, observe

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        # Call `forward`, because calling the module itself would run this hook again.
        with self.attention.off():
            exact = module.forward(*args, **kwargs)
        self.observe(self.layer, _hidden_states(output), _hidden_states(exact))


def _hidden_states(output: Any) -> torch.Tensor:
    """The hidden states of a module that returns them alone, or in a tuple before the attention
    weights."""
    states: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return states


def _attention_kl(
    attend: Attention,
    query: torch.Tensor,
    key: torch.Tensor,
    keys: torch.Tensor,
    mask: TwoCopyMask,
    queries: torch.Tensor,
) -> torch.Tensor:
    """`KL(exact || simulated)` `[B, Q]` of selected queries' attention, averaged over heads.

    * `query`, `key`: those of the exact model, before any mean is subtracted;
    * `keys`: `[exact; quantized]`, as the simulated cache holds them;
    * `mask`: the two-copy mask of the call;
    * `queries`: the positions `[Q]` of the queries to compare.
    """
    batch, heads, _, _ = query.shape
    size = max(1, SCORES // (batch * heads * keys.shape[2]))
    at, parts = queries.to(query.device), []
    for positions in at.split(size):
        rows = as_additive(mask.rows(positions), torch.float32)
        parts.append(_divergence_of(attend, query[:, :, positions], key, keys, rows))
    return torch.cat(parts, dim=1)


def _divergence_of(
    attend: Attention,
    query: torch.Tensor,
    key: torch.Tensor,
    keys: torch.Tensor,
    mask: torch.Tensor,
) -> torch.Tensor:
    """The divergence `[B, Q]` of queries `[B, H_q, Q, D]` with the two-copy mask `[B, 1, Q, 2T]`,
    float32 and additive."""
    length = key.shape[2]
    # The query sees a position if it sees either copy.
    exact_mask = torch.maximum(mask[..., :length], mask[..., length:])
    exact = replace(attend, mask=exact_mask).weights(query, key)
    both = replace(attend, mask=mask).weights(query, keys)
    simulated = both[..., :length] + both[..., length:]
    # In float64, because the KL divergence of nearly equal weights is a small difference of large
    # terms.
    return divergence(exact.double(), simulated.double()).mean(1)
