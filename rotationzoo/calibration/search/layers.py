"""Chooses the rotations of every layer, head by head, and saves each layer that is done."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rotationzoo.calibration.checkpoint import Checkpoint, Matrices
from rotationzoo.calibration.equalizing import stored_equalizers
from rotationzoo.calibration.search import memory
from rotationzoo.calibration.search.frame import LayerData
from rotationzoo.calibration.search.layer import LayerSearch
from rotationzoo.calibration.search.sampling import Rows, Samples, sample_queries, sample_rows
from rotationzoo.calibration.search.task import SearchTask
from rotationzoo.model.geometry import Layer, cached_layers
from rotationzoo.model.projection import OutputProjection, output_projections
from rotationzoo.progress import Progress


def search_layers(
    task: SearchTask, deadline: float, checkpoint: Checkpoint | None, progress: Progress
) -> tuple[Matrices, dict[str, Any]]:
    """Choose the matrices of every layer; also return their record.

    Layers that the checkpoint already holds are not searched again.
    """
    projections = output_projections(task.model, task.geometry)
    equalizers = stored_equalizers(task.baseline)
    layers = cached_layers(task.geometry)
    chosen, record = checkpoint.read_search() if checkpoint is not None else ({}, {})
    remaining = [layer for layer in layers if str(layer.index) not in record]
    total, done = 2 * len(layers), 2 * (len(layers) - len(remaining))
    # Matrices and records are saved after every layer, so a stopped search loses at most one layer.
    for group in _group_by_memory(task, remaining):
        indices = {layer.index for layer in group}
        samples, projection_records = _sample_group(task, projections, indices)
        rows = _sample_rows_to_learn(task, indices, deadline)
        for layer in group:
            progress("searching", done, total)
            # Pop the samples of a layer, so that they are freed once it is done: the search for
            # clip ratios needs the memory.
            data = LayerData(
                task.statistics[layer.index], samples.pop(layer.index), rows.pop(layer.index, None)
            )
            data = data.fold(equalizers.get(layer.index))
            search = LayerSearch(
                layer,
                data.moments,
                task.recipe,
                task.baseline[layer.index],
                data.samples,
                data.rows,
            )
            key = search.choose_keys(next_deadline(deadline, total - done))
            done += 1
            progress("searching", done, total)
            value = search.choose_values(key, next_deadline(deadline, total - done))
            done += 1
            chosen[layer.index, "key"] = key.matrix.cpu().contiguous()
            chosen[layer.index, "value"] = value.matrix.cpu().contiguous()
            record[str(layer.index)] = {
                "key": key.record,
                "value": value.record,
                "projection": projection_records[layer.index],
            }
            if checkpoint is not None:
                checkpoint.save_search(chosen, record)
    progress("searching", done, total)
    return chosen, record


def _group_by_memory(task: SearchTask, layers: Sequence[Layer]) -> list[list[Layer]]:
    """Group layers whose samples fit in memory together, so that they share forward passes."""
    held_out = [len(row) for row in task.choosing]
    fitted = [len(row) for row in task.fitted]
    lengths = memory.TextLengths(held_out, fitted)
    hidden = task.model.config.get_text_config(decoder=True).hidden_size
    groups: list[list[Layer]] = []
    used = 0
    for layer in layers:
        size = memory.sample_bytes(task.geometry, layer, task.settings, lengths, hidden)
        if not groups or used + size > memory.SAMPLE_BYTES:
            groups.append([])
            used = 0
        groups[-1].append(layer)
        used += size
    return groups


def _sample_group(
    task: SearchTask, projections: Mapping[int, OutputProjection], owners: set[int]
) -> tuple[Samples, dict[int, dict[str, str]]]:
    """Query samples of all layers that read the caches of `owners`.

    Also returns, by owner, a record of how the output projection of each reader was read.
    """
    matrices: dict[int, torch.Tensor | None] = {}
    records: dict[int, dict[str, str]] = {owner: {} for owner in owners}
    for index, projection in projections.items():
        owner = projection.layer.owner
        if owner in owners:
            matrices[index], records[owner][str(index)] = projection.read()
    samples = sample_queries(
        task.model, task.geometry, task.choosing, task.cache, task.settings.queries, matrices
    )
    return samples, records


def _sample_rows_to_learn(task: SearchTask, layers: set[int], deadline: float) -> Rows:
    """Keys and values to learn from; none if nothing is to be learned or no time is left."""
    if task.settings.steps == 0 or time.monotonic() >= deadline:
        return {}
    return sample_rows(task.model, task.fitted, task.recipe.sink, layers)


def next_deadline(deadline: float, left: int) -> float:
    """The time at which the next of `left` equal parts of the time until `deadline` ends."""
    now = time.monotonic()
    return now + max(0.0, deadline - now) / left
