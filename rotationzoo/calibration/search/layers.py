"""Chooses the rotations of every layer, head by head, and saves each layer that is done."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from rotationzoo import ranks
from rotationzoo.calibration.checkpoint import Checkpoint, Matrices
from rotationzoo.calibration.equalizing import stored_equalizers
from rotationzoo.calibration.search.choice import Choice
from rotationzoo.calibration.search.draws import SamplingSettings
from rotationzoo.calibration.search.frame import LayerData
from rotationzoo.calibration.search.layer import LayerSearch
from rotationzoo.calibration.search.learn import LearningSettings
from rotationzoo.calibration.search.learn_group import learn_side
from rotationzoo.calibration.search.memory import LayerFootprint, TextLengths
from rotationzoo.calibration.search.sampling import take_samples
from rotationzoo.calibration.search.shelf import Shelf
from rotationzoo.calibration.search.stored import Samples
from rotationzoo.calibration.search.task import SearchTask
from rotationzoo.calibration.search.threads import start_in_threads
from rotationzoo.model.geometry import Layer, cached_layers
from rotationzoo.model.placement import free_memory
from rotationzoo.model.projection import OutputProjection, output_projections
from rotationzoo.progress import Progress, silent
from rotationzoo.rotations import SIDES

_STEPS = 2 * len(SIDES)  # of progress in a layer: each side is ranked, and then settled


@dataclass(frozen=True)
class ChosenLayer:
    """What was chosen for one layer."""

    layer: Layer
    sides: Mapping[str, Choice]
    projections: Mapping[str, str]
    """Layer that reads the cache -> how its output projection was read."""

    @property
    def record(self) -> dict[str, Any]:
        """The manifest's record of the choice."""
        sides = {side: choice.record for side, choice in self.sides.items()}
        return {**sides, "projection": dict(self.projections)}


def search_layers(
    task: SearchTask, deadline: float, checkpoint: Checkpoint | None, progress: Progress
) -> tuple[Matrices, dict[str, Any]]:
    """Choose the matrices of every layer; also return their record.

    Layers that the checkpoint already holds are not searched again. Processes that `ranks` joins
    share the layers, and each returns all matrices.
    """
    layers = cached_layers(task.geometry)
    chosen, record = checkpoint.read_search() if checkpoint is not None else ({}, {})
    remaining = [layer for layer in ranks.share(layers) if str(layer.index) not in record]
    saved = len(record)
    try:
        for done in choose_layers(task, remaining, deadline, progress):
            for side, choice in done.sides.items():
                chosen[done.layer.index, side] = choice.matrix.cpu().contiguous()
            record[str(done.layer.index)] = done.record
            if checkpoint is not None and checkpoint.save_search(chosen, record):
                saved = len(record)
    finally:
        # Layers take minutes, so Ctrl-C, the loss of another process or an error loses none that
        # is done. Nor does whatever stops the stages that follow.
        if checkpoint is not None and len(record) > saved:
            checkpoint.save_search(chosen, record, at_once=True)
    return _gather(layers, chosen, record)


def _gather(
    layers: Sequence[Layer], chosen: Matrices, record: Mapping[str, Any]
) -> tuple[Matrices, dict[str, Any]]:
    """The matrices and the record of all layers, of which this process has chosen its share."""
    shares = []
    for layer in ranks.share(layers):
        words = json.dumps(record[str(layer.index)]).encode()
        matrices = {side: chosen[layer.index, side] for side in SIDES}
        shares.append({**matrices, "record": torch.frombuffer(bytearray(words), dtype=torch.uint8)})
    everything: Matrices = {}
    records = {}
    for layer, share in zip(layers, ranks.gather(shares), strict=True):
        records[str(layer.index)] = json.loads(share.pop("record").numpy().tobytes())
        everything |= {(layer.index, side): matrix for side, matrix in share.items()}
    return everything, records


def choose_layers(
    task: SearchTask, layers: Sequence[Layer], deadline: float, progress: Progress = silent
) -> Iterator[ChosenLayer]:
    """Search some of a model's layers, and yield each that is done.

    What is chosen for a layer does not depend on the others, but for rounding. As many layers as
    fit in memory share one pass of the texts through the model; of these, as many as can be learned
    at once are searched side by side.
    """
    left, needs = _Progress(progress, _STEPS * len(layers)), _footprint(task)
    modules = output_projections(task.model, task.geometry)
    item = task.model.dtype.itemsize
    while layers:
        samples = _sample(task, layers, deadline, Shelf(needs.reserve(item)), progress)
        left.tell(0)
        group, layers = layers[: len(samples)], layers[len(samples) :]
        while group:
            room = free_memory(samples[group[0].index].device)
            count = needs.searched_at_once(group[0], item, room)
            part, group = _Part(task, group[:count], modules), group[count:]
            yield from _search_part(part, samples, deadline, left)


def _footprint(task: SearchTask) -> LayerFootprint:
    choosing, fitted = (list(map(len, rows)) for rows in (task.choosing, task.fitted))
    lengths = TextLengths(choosing, fitted)
    device = task.model.device.type
    # Where the first weights are offloaded, a GPU computes if there is one.
    on_cpu = device == "cpu" or (device == "meta" and not torch.cuda.is_available())
    return LayerFootprint(task.geometry, task.settings, lengths, task.hidden, on_cpu)


@dataclass(frozen=True)
class _Part:
    """Layers that are searched side by side."""

    task: SearchTask
    layers: Sequence[Layer]
    modules: Mapping[int, OutputProjection]


class _Progress:
    """Counts the steps of the layers that are searched."""

    def __init__(self, progress: Progress, total: int):
        self.progress, self.done, self.total = progress, 0, total

    def tell(self, steps: int = 1) -> None:
        self.done += steps
        ranks.beat()
        self.progress("searching", self.done, self.total)

    def deadline(self, deadline: float, sides: int) -> float:
        """The time at which the learning of so many sides of layers must end, to leave the others
        their share of the time until `deadline`."""
        left = (self.total - self.done) / 2
        return next_deadline(deadline, left / sides)


def _search_part(
    part: _Part, samples: Samples, deadline: float, left: _Progress
) -> Iterator[ChosenLayer]:
    task, equalizers = part.task, stored_equalizers(part.task.baseline)
    searches, origins = [], []
    for layer in part.layers:
        projections, origin = _read_projections(part.modules, layer)
        data = LayerData.fold(
            task.statistics[layer.index],
            # Popped, so that the samples are freed once these layers are done: the search for clip
            # ratios needs the memory.
            samples.pop(layer.index),
            projections,
            equalizers.get(layer.index),
        )
        searches.append(LayerSearch(layer, data, task.recipe, task.baseline[layer.index]))
        origins.append(origin)
    steps, rate = task.settings.steps, task.settings.rate
    chosen: list[dict[str, Choice]] = [{} for _ in searches]
    for side in SIDES:
        until = left.deadline(deadline, len(searches))
        making = start_in_threads(partial(LayerSearch.make_forms, side=side), searches)
        rankings = []
        for search, sides, forms in zip(searches, chosen, making, strict=True):
            rankings.append(search.rank(side, forms.result(), sides.get("key")))
            left.tell()
        learned = learn_side(
            side,
            searches,
            rankings,
            LearningSettings(steps, rate, task.recipe.seed, deadline=until),
        )
        for number, search in enumerate(searches):
            sides = chosen[number]
            sides[side] = search.settle(side, rankings[number], learned[number], sides.get("key"))
            left.tell()
    for layer, sides, origin in zip(part.layers, chosen, origins, strict=True):
        yield ChosenLayer(layer, sides, origin)


def _sample(
    task: SearchTask, layers: Sequence[Layer], deadline: float, shelf: Shelf, progress: Progress
) -> Samples:
    """Samples of the first of some layers, as many as fit on a shelf."""
    learns = task.settings.steps > 0 and time.monotonic() < deadline
    settings = SamplingSettings(
        choosing=task.choosing,
        fitted=task.fitted if learns else [],
        cache=task.cache,
        queries=task.settings.queries,
        batch=task.batch,
    )
    with task.passes.of("samples"):
        return take_samples(task.model, task.geometry, layers, settings, shelf, progress)


def _read_projections(
    modules: Mapping[int, OutputProjection], owner: Layer
) -> tuple[dict[int, torch.Tensor | None], dict[str, str]]:
    """The output projections of the layers that read a cache, and how each was read."""
    matrices: dict[int, torch.Tensor | None] = {}
    origins = {}
    for index, projection in modules.items():
        if projection.layer.owner == owner.index:
            matrices[index], origins[str(index)] = projection.read()
    return matrices, origins


def next_deadline(deadline: float, left: float) -> float:
    """The time at which the next of `left` equal parts of the time until `deadline` ends."""
    now = time.monotonic()
    return now + max(0.0, deadline - now) / left
