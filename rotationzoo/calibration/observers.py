"""Observers that add what each layer caches, its queries and its attention outputs to the running
sums, or what errors of its rows cost."""

import torch

from rotationzoo.artifact.layout import statistic_dims
from rotationzoo.errors import UnsupportedModel
from rotationzoo.geometry import Geometry, Layer, cached_layers
from rotationzoo.linalg import run_sums
from rotationzoo.linalg.moments import Moment, Statistics
from rotationzoo.model.capture import Call
from rotationzoo.model.latent import ReadErrors, cached_of, read_errors
from rotationzoo.recipe import Recipe
from rotationzoo.sides import HEADS, LATENTS


def zero_statistics(geometry: Geometry, recipe: Recipe, device: torch.device) -> Statistics:
    """The initial sums: four moments per cached layer, one more with key energy."""
    statistics: Statistics = {}
    for layer in cached_layers(geometry):
        dims = statistic_dims(layer, recipe).items()
        moments = {kind: Moment.zeros(layer.kv_heads, dim, device) for kind, dim in dims}
        statistics[layer.index] = moments
    return statistics


def add_rows(
    statistics: Statistics,
    layer: Layer,
    kind: str,
    tensor: torch.Tensor,
    weights: torch.Tensor | None = None,
) -> None:
    """Add `[B, H, T, D]`, with optional weights `[B, H, T]`, to the sums of the owner of the cache
    that a layer reads; H is a multiple of the KV heads."""
    moments = statistics[layer.owner]
    # Sums stay on the device of the layer that owns them; weights may be spread over several.
    if layer.owner == layer.index:
        moments[kind] = moments[kind].to(tensor.device)
    _add(moments[kind], tensor, weights)


def _add(moment: Moment, tensor: torch.Tensor, weights: torch.Tensor | None = None) -> None:
    """Add `[B, H, T, D]`, with optional weights `[B, H, T]`, to a moment of as many heads or
    fewer."""
    heads = len(moment.weight)
    by_kv_head = torch.unflatten(tensor, 1, (heads, -1))
    weight = None if weights is None else torch.unflatten(weights, 1, (heads, -1))
    if run_sums.on_tensor_cores(tensor):
        if weight is not None:
            weight = weight.transpose(0, 1).flatten(1).to(moment.second.device)
        rows = run_sums.rows_of_heads(tensor, heads).to(moment.second.device)
        run_sums.add_runs(moment, rows, weight)
        return
    for number, row in enumerate(by_kv_head):  # one at a time limits the size of float64 copies
        moment.add(row.flatten(1, 2), None if weight is None else weight[number].flatten(1))


class MomentObserver:
    """Sums second moments of queries, outputs, keys and values, for the layer that owns their
    cache. Keys and values count from position `skip` on."""

    kinds: tuple[str, ...] = ("query", *HEADS.sides, "output", *LATENTS.sides)
    """What it adds to, of what a layer has."""

    def __init__(self, geometry: Geometry, statistics: Statistics, skip: int):
        self.layers = {layer.index: layer for layer in geometry}
        self.statistics = statistics
        self.skip = skip

    def watch(self, call: Call) -> torch.Tensor:
        """An `Intercept` that adds up what the attention of a layer reads, and changes nothing."""
        output = call.run()
        layer = self.layer(call.layer)
        if layer.cached is HEADS:
            self.add_heads(layer, call, output.transpose(1, 2))
            return output
        for side, rows in cached_of(call).sides.items():
            add_rows(self.statistics, layer, side, rows[:, :, self.skip :])
        self._add_costs(call.layer, read_errors(call, output, self.skip))
        return output

    def add_heads(self, layer: Layer, call: Call, output: torch.Tensor) -> None:
        """Add the rows of a call with the output `[B, H_q, T, D_v]`."""
        add_rows(self.statistics, layer, "query", call.query)
        add_rows(self.statistics, layer, "output", output)
        # A layer that reads another layer's cache receives the owner's keys and values. They count
        # only once, at their owner.
        if layer.owner == layer.index:
            add_rows(self.statistics, layer, "key", call.key[:, :, self.skip :])
            add_rows(self.statistics, layer, "value", call.value[:, :, self.skip :])

    def _add_costs(self, index: int, errors: ReadErrors) -> None:
        """Add what errors of rows that all heads share cost."""
        _, heads, _, dim = errors.queries.shape
        by_head = Moment.zeros(heads, dim, errors.queries.device)
        _add(by_head, errors.queries)
        absorbed = errors.absorb(by_head)
        nothing = torch.zeros_like(absorbed.first)
        reads = Moment(errors.value_metric[None], nothing, absorbed.weight)
        moments = self.statistics[index]
        for kind, added in {"query": absorbed, "output": reads}.items():
            moments[kind] = moments[kind].to(errors.queries.device) + added

    def layer(self, index: int) -> Layer:
        """The layer with this index. Raises `UnsupportedModel` if it was not found before."""
        if index not in self.layers:
            raise UnsupportedModel(
                f"layer {index} calls attention although it did not when the model was looked at"
            )
        return self.layers[index]


class KeyEnergyObserver(MomentObserver):
    """Sums second moments of values weighted by their key energy `k C_Q k^T`.

    C_Q is the second moment of the queries of all rows, which `totals` have. OSCAR's published code
    uses this weight in place of the attention that a value receives.
    """

    kinds = ("key_energy",)

    def __init__(self, geometry: Geometry, statistics: Statistics, skip: int, totals: Statistics):
        super().__init__(geometry, statistics, skip)
        self.query_moments = {
            layer: moments["query"].second_moment for layer, moments in totals.items()
        }

    def add_heads(self, layer: Layer, call: Call, output: torch.Tensor) -> None:
        """Add the values of a call, unless the layer reads another layer's cache."""
        index, key = layer.index, call.key
        if layer.owner != index:
            return
        query_moment = self.query_moments[index].to(key.device)
        self.query_moments[index] = query_moment
        keys, values = key[:, :, self.skip :], call.value[:, :, self.skip :]
        energies = [_key_energy(row, query_moment) for row in keys]
        add_rows(self.statistics, layer, "key_energy", values, torch.stack(energies))


def _key_energy(keys: torch.Tensor, query_moment: torch.Tensor) -> torch.Tensor:
    """`k C_Q k^T` `[H, T]` of the keys `[H, T, D]` of one row of text."""
    if run_sums.on_tensor_cores(keys):
        return run_sums.quadratic_form(keys, query_moment)
    keys = keys.double()
    energy: torch.Tensor = ((keys @ query_moment) * keys).sum(-1)
    return energy
