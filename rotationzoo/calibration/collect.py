"""Token rows through the model -> second moments of what its attention reads and writes."""

import torch
from transformers import PreTrainedModel

from rotationzoo.calibration.checkpoint import Checkpoint
from rotationzoo.errors import RotationZooError, UnsupportedModel
from rotationzoo.linalg.moments import Moment, Statistics
from rotationzoo.model.capture import capture, decoder
from rotationzoo.model.geometry import Geometry, Layer, cached_layers
from rotationzoo.model.loading import input_device
from rotationzoo.progress import Progress, silent
from rotationzoo.recipe import Recipe


@torch.no_grad()
def collect(
    model: PreTrainedModel,
    geometry: Geometry,
    batches: list[torch.Tensor],
    recipe: Recipe,
    checkpoint: Checkpoint | None = None,
    progress: Progress = silent,
) -> Statistics:
    """The moments that a recipe needs, per cached layer and KV head, over batches `[B, T]` of token
    ids.

    Queries and outputs of every position count, for the layer that owns the cache they read; keys
    and values from position `sink` on. `key_energy` takes a second pass over the same rows, since
    its weights need `C_Q` of all of them. Raises `UnsupportedModel` if a layer is missed and
    `RotationZooError`, naming the layer, if an activation is not finite.
    """
    two_passes = recipe.value_statistic == "key_energy"
    zeros = _zeros(geometry, two_passes)
    statistics, done = (checkpoint and checkpoint.read(zeros)) or (zeros, 0)
    tower = decoder(model)
    total = len(batches) * (2 if two_passes else 1)
    skip = recipe.sink if recipe.exclude_sink else 0
    observer: _FirstPass | _SecondPass = _FirstPass(geometry, statistics, skip)
    for step in range(done, total):
        if step >= len(batches) and not isinstance(observer, _SecondPass):
            observer = _SecondPass(geometry, statistics, skip)
        with capture(model, observer):
            tower(input_ids=batches[step % len(batches)].to(input_device(model)), use_cache=False)
        try:
            _check(statistics, observer.kinds)
        except RotationZooError:
            if checkpoint is not None:
                checkpoint.remove()  # going on with other options would only be refused
            raise
        if checkpoint is not None:
            checkpoint.save(statistics, step + 1)
        progress("calibrating", step + 1, total)
    _check_counts(statistics, geometry, batches, skip)
    return statistics


class _FirstPass:
    """Second moments of queries, outputs, keys and values."""

    kinds: tuple[str, ...] = ("query", "key", "value", "output")

    def __init__(self, geometry: Geometry, statistics: Statistics, skip: int):
        self.layers = {layer.index: layer for layer in geometry}
        self.statistics = statistics
        self.skip = skip

    def __call__(
        self,
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        layer = self._layer(index)
        self._add(layer, "query", query)
        self._add(layer, "output", output)
        if layer.owner == layer.index:
            self._add(layer, "key", key[:, :, self.skip :])
            self._add(layer, "value", value[:, :, self.skip :])

    def _add(self, layer: Layer, kind: str, tensor: torch.Tensor) -> None:
        """Add `[B, H, T, D]`, H a multiple of the KV heads, to the sums of the cache's owner."""
        kinds = self.statistics[layer.owner]
        if layer.owner == layer.index:
            kinds[kind] = kinds[kind].to(tensor.device)
        for row in tensor:  # one row at a time bounds the float64 copies
            kinds[kind].add(row.unflatten(0, (layer.kv_heads, -1)).flatten(1, 2))

    def _layer(self, index: int) -> Layer:
        if index not in self.layers:
            raise UnsupportedModel(
                f"layer {index} calls attention although it did not when the model was looked at"
            )
        return self.layers[index]


class _SecondPass(_FirstPass):
    """Values weighted by `k C_Q k^T`, the published code's stand-in for the attention they
    receive."""

    kinds = ("key_energy",)

    def __init__(self, geometry: Geometry, statistics: Statistics, skip: int):
        super().__init__(geometry, statistics, skip)
        self.query_moments = {
            layer: kinds["query"].second_moment for layer, kinds in statistics.items()
        }

    def __call__(
        self,
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        if self._layer(index).owner != index:
            return
        kinds = self.statistics[index]
        kinds["key_energy"] = kinds["key_energy"].to(value.device)
        c_q = self.query_moments[index] = self.query_moments[index].to(key.device)
        for k, v in zip(key[:, :, self.skip :].double(), value[:, :, self.skip :], strict=True):
            kinds["key_energy"].add(v, ((k @ c_q) * k).sum(-1))


def _zeros(geometry: Geometry, two_passes: bool) -> Statistics:
    dims = {"query": "key_dim", "output": "value_dim", "key": "key_dim", "value": "value_dim"}
    if two_passes:
        dims["key_energy"] = "value_dim"
    return {
        layer.index: {
            kind: Moment.zeros(layer.kv_heads, getattr(layer, dim)) for kind, dim in dims.items()
        }
        for layer in cached_layers(geometry)
    }


def _check(statistics: Statistics, kinds: tuple[str, ...]) -> None:
    """Everything seen was finite: one reading of the device a batch, before it is saved."""
    for layer, moments in statistics.items():
        for kind in kinds:
            if not torch.isfinite(moments[kind].first).all():
                raise RotationZooError(
                    f"layer {layer} has {kind.replace('_', ' ')} activations that are not finite",
                    hint="run again with --dtype float32; if that does not help, the weights are damaged",
                )


def _check_counts(
    statistics: Statistics, geometry: Geometry, batches: list[torch.Tensor], skip: int
) -> None:
    """Every layer was handed every token, once."""
    tokens = sum(ids.numel() for ids in batches)
    past_sink = sum(ids.shape[0] * max(ids.shape[1] - skip, 0) for ids in batches)
    if not past_sink:
        raise RotationZooError(
            f"no row is longer than the {skip} sink tokens that are left out of the key and value sums",
            hint="give longer rows with --length, or longer documents",
        )
    for owner, kinds in statistics.items():
        queries = tokens * sum(layer.group for layer in geometry if layer.owner == owner)
        for kind, expected in {
            "query": queries,
            "output": queries,
            "key": past_sink,
            "value": past_sink,
        }.items():
            if not (kinds[kind].weight == expected).all():
                seen = int(kinds[kind].weight[0])
                raise UnsupportedModel(
                    f"the hooks saw {seen} {kind} rows of layer {owner} instead of {expected}"
                )
