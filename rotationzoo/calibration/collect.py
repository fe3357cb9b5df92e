"""The main loop of a calibration: batches of token rows -> second moments of attention's inputs and
outputs. The sums of finished batches are kept apart from those of the current one."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from rotationzoo.artifact.layout import statistic_dims
from rotationzoo.calibration.checkpoint import Checkpoint, damaged
from rotationzoo.errors import RotationZooError, Unsound, UnsupportedModel
from rotationzoo.geometry import Geometry, Layer, cached_layers
from rotationzoo.linalg.moments import Moment, Statistics, add_runs, on_tensor_cores, rows_of_heads
from rotationzoo.model import prediction
from rotationzoo.model.capture import Call, decoder, intercept
from rotationzoo.model.latent import ReadErrors, cached_of, read_errors
from rotationzoo.model.loading import input_device
from rotationzoo.progress import InTokens, Progress, silent
from rotationzoo.recipe import Recipe
from rotationzoo.sides import HEADS, LATENTS
from rotationzoo.text.rows import MediaRow


@torch.no_grad()
def collect(
    model: PreTrainedModel,
    geometry: Geometry,
    batches: Sequence[torch.Tensor | MediaRow],
    recipe: Recipe,
    checkpoint: Checkpoint | None = None,
    progress: Progress = silent,
) -> Statistics:
    """Collect a recipe's second moments, for each cached layer and KV head, from token ids `[B, T]`
    or rows with images or audio, and save and resume their sums. Queries and outputs count at every
    position, for the layer that owns the cache; keys and values past the sink, if the recipe says
    so. `key_energy` takes a second pass. Raises `UnsupportedModel` if the hooks miss a layer or a
    token, and `Unsound` for NaN or inf."""
    passes = 2 if recipe.value_statistic == "key_energy" else 1
    # On the device of most layers: moving zeros from the CPU can take longer than a batch.
    sums = RunningSums(partial(zero_statistics, geometry, recipe, input_device(model)), checkpoint)
    if checkpoint is not None and sums.done > passes * len(batches):
        raise damaged(checkpoint.path)
    # The sink stays exact in the cache, so its outliers should not shape the rotations.
    skip = recipe.sink if recipe.exclude_sink else 0
    progress = InTokens(progress, [_count(batch, 0) for batch in batches] * passes)
    progress("calibrating", sums.done, passes * len(batches))
    observer = MomentObserver(geometry, sums.batch, skip)

    with sums.saved_if_interrupted():
        for number in range(passes):
            if number == 1:
                # It needs the finished query moments of the first pass.
                observer = KeyEnergyObserver(geometry, sums.batch, skip, sums.whole)
            first = number * len(batches)
            for batch in batches[max(sums.done - first, 0) :]:
                counting = prediction.counting_layers(model, progress.tell_part)
                with intercept(model, observer.watch), counting:
                    states = read_row(model, batch)
                prediction.check_finite(model, states[0], partial(read_row, model, batch))
                sums.finish_batch(observer.kinds)
                progress("calibrating", sums.done, passes * len(batches))
    tokens = sum(_count(batch, 0) for batch in batches)
    past_sink = sum(_count(batch, skip) for batch in batches)
    _check_sums(sums.whole, geometry, tokens, past_sink, skip)
    return sums.whole


def read_row(model: PreTrainedModel, row: torch.Tensor | MediaRow) -> Any:
    """The output of a model for rows, without its language-model head where possible."""
    if isinstance(row, torch.Tensor):
        return decoder(model)(input_ids=row.to(input_device(model)), use_cache=False)
    device, inputs = input_device(model), {}
    for name, tensor in row.inputs.items():
        inputs[name] = tensor.to(device, model.dtype if tensor.is_floating_point() else None)
    for reader in (model.base_model, model):  # either may drop inputs it does not know
        if inputs.keys() <= inspect.signature(reader.forward).parameters.keys():
            return reader(input_ids=row.ids.to(device), use_cache=False, **inputs)
    raise UnsupportedModel(f"{type(model).__name__} does not take all of {', '.join(inputs)}")


def _count(batch: torch.Tensor | MediaRow, first: int) -> int:
    """The number of positions of a batch, from position `first` of each row on."""
    ids = batch.ids if isinstance(batch, MediaRow) else batch
    return ids[:, first:].numel()


def _check_sums(
    statistics: Statistics, geometry: Geometry, tokens: int, past_sink: int, skip: int
) -> None:
    """Raise `UnsupportedModel` unless the hooks saw every token in every layer exactly once,
    `Unsound` if a sum is not finite, and `RotationZooError` if no token is `past_sink`."""
    if not past_sink:
        hint = "give longer rows with --length, or longer documents"
        problem = f"no token lies past the {skip} sink tokens, which do not count"
        raise RotationZooError(problem, hint)
    for owner, moments in statistics.items():
        # The query heads of a group count separately, and so do the layers that share a cache.
        queries = tokens * sum(layer.group for layer in geometry if layer.owner == owner)
        expected = {"query": queries, "output": queries, "key_energy": None}
        for kind, moment in moments.items():
            count = expected.get(kind, past_sink)
            if count is None:
                continue
            if not (moment.weight == count).all():
                seen = f"{int(moment.weight[0])} {kind} rows of layer {owner}"
                raise UnsupportedModel(f"the hooks saw {seen} instead of {count}")
            # The output may not show them: a key of minus infinity can have no weight.
            if not all(each.isfinite().all() for each in _sums(moment)):
                problem = f"layer {owner} has {kind} activations that are not finite"
                hint = "run again with --dtype float32; if that is set, the weights are damaged"
                raise Unsound(problem, hint)


class RunningSums:
    """The sums of `done` finished batches in `whole`, and of the current batch in `batch`. An error
    or Ctrl-C within a batch leaves no trace in `whole`, which can be saved."""

    def __init__(self, zeros: Callable[[], Statistics], checkpoint: Checkpoint | None):
        self.batch, self.whole, self.done = zeros(), zeros(), 0
        self._checkpoint, self._torn = checkpoint, False
        if checkpoint is not None and (saved := checkpoint.read(self.whole)) is not None:
            self.whole, self.done = saved
        self._saved = self.done

    def finish_batch(self, kinds: tuple[str, ...]) -> None:
        """Add these kinds of the current batch's sums to `whole`, and save it now and then."""
        self._torn = True
        totals, parts = [], []
        for layer, moments in self.batch.items():
            for kind in filter(moments.__contains__, kinds):
                total = self.whole[layer][kind].to(moments[kind].second.device)
                self.whole[layer][kind] = total
                totals += _sums(total)
                parts += _sums(moments[kind])
        torch._foreach_add_(totals, parts)
        torch._foreach_zero_(parts)
        self.done += 1
        self._torn = False
        if self._checkpoint is not None and self._checkpoint.save(self.whole, self.done):
            self._saved = self.done

    @contextmanager
    def saved_if_interrupted(self) -> Iterator[None]:
        """Save finished batches if Ctrl-C or SIGTERM ends the block."""
        try:
            yield
        except KeyboardInterrupt:
            if self._checkpoint is not None and self.done > self._saved and not self._torn:
                self._checkpoint.save(self.whole, self.done, at_once=True)
            raise


def _sums(moment: Moment) -> list[torch.Tensor]:
    return [getattr(moment, field.name) for field in fields(Moment)]


def zero_statistics(geometry: Geometry, recipe: Recipe, device: torch.device) -> Statistics:
    """The initial sums: four moments per cached layer, one more with key energy."""
    statistics: Statistics = {}
    for layer in cached_layers(geometry):
        dims, heads = statistic_dims(layer, recipe).items(), layer.kv_heads
        statistics[layer.index] = {kind: Moment.zeros(heads, dim, device) for kind, dim in dims}
    return statistics


def _add(moment: Moment, tensor: torch.Tensor, weights: torch.Tensor | None = None) -> None:
    """Add `[B, H, T, D]`, weighted by `[B, H, T]`, to a moment of as many heads or fewer."""
    heads = len(moment.weight)
    if weights is None and on_tensor_cores(tensor):
        add_runs(moment, rows_of_heads(tensor, heads).to(moment.second.device))
        return
    by_kv_head = torch.unflatten(tensor, 1, (heads, -1))
    weight = None if weights is None else torch.unflatten(weights, 1, (heads, -1))
    for number, row in enumerate(by_kv_head):  # one at a time limits the size of float64 copies
        moment.add(row.flatten(1, 2), None if weight is None else weight[number].flatten(1))


class MomentObserver:
    """Sums queries and outputs at all positions, and keys and values from position `skip` on."""

    kinds: tuple[str, ...] = ("query", *HEADS.sides, "output", *LATENTS.sides)
    """The statistics that it adds to, if a layer has them."""

    def __init__(self, geometry: Geometry, statistics: Statistics, skip: int):
        self.layers = {layer.index: layer for layer in geometry}
        self.statistics, self.skip = statistics, skip

    def watch(self, call: Call) -> torch.Tensor:
        """An `Intercept` that adds the rows of a call to the sums, and changes nothing."""
        output = call.run()
        if call.layer not in self.layers:
            problem = f"layer {call.layer} calls attention although it did not before"
            raise UnsupportedModel(problem)
        layer = self.layers[call.layer]
        if layer.cached is HEADS:
            self.add_heads(layer, call, output.transpose(1, 2))
            return output
        for side, rows in cached_of(call).sides.items():
            self.add_rows(layer, side, rows[:, :, self.skip :])
        self._add_costs(call.layer, read_errors(call, output, self.skip))
        return output

    def add_rows(
        self, layer: Layer, kind: str, rows: torch.Tensor, weights: torch.Tensor | None = None
    ) -> None:
        """Add rows `[B, H, T, D]`, weighted by `[B, H, T]`, to the sums of the cache's owner."""
        moments = self.statistics[layer.owner]
        if layer.owner == layer.index:
            moments[kind] = moments[kind].to(rows.device)
        _add(moments[kind], rows, weights)

    def add_heads(self, layer: Layer, call: Call, output: torch.Tensor) -> None:
        """Add the rows of a call with the output `[B, H_q, T, D_v]`."""
        self.add_rows(layer, "query", call.query)
        self.add_rows(layer, "output", output)
        # Keys and values that a layer reads from another's cache count once, at their owner.
        if layer.owner == layer.index:
            self.add_rows(layer, "key", call.key[:, :, self.skip :])
            self.add_rows(layer, "value", call.value[:, :, self.skip :])

    def _add_costs(self, index: int, errors: ReadErrors) -> None:
        _, heads, _, dim = errors.queries.shape
        by_head = Moment.zeros(heads, dim, errors.queries.device)
        _add(by_head, errors.queries)
        absorbed = errors.absorb(by_head)
        reads = Moment(errors.value_metric[None], torch.zeros_like(absorbed.first), absorbed.weight)
        moments = self.statistics[index]
        for kind, added in {"query": absorbed, "output": reads}.items():
            moments[kind] = moments[kind].to(errors.queries.device) + added


class KeyEnergyObserver(MomentObserver):
    """Sums second moments of values weighted by `k C_Q k^T`, as OSCAR's published code does. C_Q is
    the second moment of the queries of all rows, from `totals`."""

    kinds = ("key_energy",)

    def __init__(self, geometry: Geometry, statistics: Statistics, skip: int, totals: Statistics):
        super().__init__(geometry, statistics, skip)
        self.query_moments = {at: kinds["query"].second_moment for at, kinds in totals.items()}

    def add_heads(self, layer: Layer, call: Call, output: torch.Tensor) -> None:
        """Add the values of a call, unless the layer reads another layer's cache."""
        if layer.owner != layer.index:
            return
        query_moment = self.query_moments[layer.index].to(call.key.device)
        self.query_moments[layer.index] = query_moment
        keys, values = call.key[:, :, self.skip :], call.value[:, :, self.skip :]
        energies = []
        for row in keys.unbind():  # one row of text at a time, in float64
            row = row.double()
            energies.append(((row @ query_moment) * row).sum(-1))
        self.add_rows(layer, "key_energy", values, torch.stack(energies))
