"""What keys need for a moving mean and for Fisher weights, collected from text.

* The moving mean is the mean of keys before RoPE, turned to each position.
* Fisher weights weigh each query by the sum of `p (1 - p)` over the quantized positions that it
  reads: what small errors of scores change in its attention.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from rotationzoo.calibration.observers import add_rows
from rotationzoo.codec.layout import CacheLayout
from rotationzoo.geometry import Geometry, Layer, cached_layers
from rotationzoo.linalg.moments import Moment, Statistics
from rotationzoo.model.capture import Attention, intercept
from rotationzoo.model.prediction import run_decoder
from rotationzoo.simulation.masks import TwoCopyMask, as_additive

Rows = torch.Tensor
Angles = tuple[torch.Tensor, torch.Tensor]
"""The cosines and sines `[T, D]` with which a layer turns the rows of T positions."""


def turn(rows: torch.Tensor, angles: Angles, back: bool = False) -> torch.Tensor:
    """Rows `[..., T, D]` with RoPE, or with this RoPE taken `back`, in float64. All channels must
    be turned, in halves, as Llama does it, and none be scaled."""
    cosine, sine = (each[: rows.shape[-2]].double() for each in angles)
    low, high = rows.double().chunk(2, -1)
    other = torch.cat([-high, low], -1) * sine
    return rows * cosine - other if back else rows * cosine + other


class KeyStatistics:
    """The statistics of a model, of rows of token ids `[T]`; `longest` positions get a mean."""

    def __init__(
        self,
        model: PreTrainedModel,
        geometry: Geometry,
        cache: CacheLayout,
        rows: Iterable[torch.Tensor],
        longest: int,
    ):
        self.model, self.geometry, self.cache = model, geometry, cache
        self.layers = {layer.index: layer for layer in geometry}
        rows = list(rows)
        angles: dict[int, Angles] = find_angles(model, longest)
        first, about = self._zeros(), self._zeros()

        def add_first(layer: Layer, query: Rows, key: Rows, attend: Attention) -> None:
            add_rows(first, layer, "query", query, self._fisher(query, key, attend))
            if layer.owner == layer.index:
                before = turn(key, angles[layer.index], back=True)
                add_rows(first, layer, "key", before[:, :, cache.sink :])

        self._watch(rows, add_first)
        means = {}
        for index, moments in first.items():
            mean = moments["key"].mean[:, None].expand(-1, longest, -1)
            means[index] = turn(mean, angles[index])[:, cache.sink :]

        def add_about(layer: Layer, query: Rows, key: Rows, attend: Attention) -> None:
            if layer.owner == layer.index:
                past = key[:, :, cache.sink :]
                past = past - means[layer.index][:, : past.shape[2]]
                add_rows(about, layer, "key", past)

        self._watch(rows, add_about)
        self.queries = {index: moments["query"] for index, moments in first.items()}
        """The moments of each layer's queries by Fisher weights."""
        self.keys = {index: moments["key"] for index, moments in about.items()}
        """The moments of each layer's keys about the moving mean, after the sink."""
        self.means = {index: means[index] + self.keys[index].mean[:, None] for index in means}
        """What to subtract of each layer's keys `[H, T, D]` after the sink: the moving mean, and
        what is left of their mean."""

    def _zeros(self) -> Statistics:
        statistics: Statistics = {}
        for layer in cached_layers(self.geometry):
            shape = layer.kv_heads, layer.key_dim, self.model.device
            statistics[layer.index] = {kind: Moment.zeros(*shape) for kind in ("query", "key")}
        return statistics

    def _fisher(self, query: torch.Tensor, key: torch.Tensor, attend: Attention) -> torch.Tensor:
        """The weights `[B, H_q, T]` of queries."""
        two_copies = TwoCopyMask(attend, self.cache, key.device, key.shape[2])
        mask = as_additive(two_copies.rows(slice(None)), torch.float32)
        exact, quantized = mask.chunk(2, -1)
        seen = replace(attend, mask=torch.maximum(exact, quantized))
        shares = seen.weights(query, key)
        return (shares * (1 - shares) * (quantized == 0)).sum(-1)

    @torch.no_grad()
    def _watch(self, rows: list[Rows], add: Callable[[Layer, Rows, Rows, Attention], None]) -> None:
        """Hand every layer's queries, keys and attention to a function."""

        def watch(index: int, query: Rows, key: Rows, value: Rows, attend: Attention) -> Rows:
            add(self.layers[index], query, key, attend)
            return attend(query, key, value)

        for row in rows:
            with intercept(self.model, watch):
                run_decoder(self.model, row[None])


@torch.no_grad()
def find_angles(model: PreTrainedModel, length: int) -> dict[int, Angles]:
    """The angles of each layer, as the model gives them to its attention."""
    found: dict[int, Angles] = {}

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        angles = kwargs.get("position_embeddings")
        if isinstance(angles, tuple):
            found[module.layer_idx] = angles[0][0], angles[1][0]

    modules = [module for module in model.modules() if hasattr(module, "layer_idx")]
    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in modules]
    try:
        run_decoder(model, torch.zeros(1, length, dtype=torch.long))
    finally:
        for hook in hooks:
            hook.remove()
    return found
