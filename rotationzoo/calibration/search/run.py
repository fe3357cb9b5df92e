"""The search over a whole model: samples of its text, a choice in every layer, and clip ratios by
the model's own loss.

Everything is judged on calibration text that the statistics have not seen, and whatever is not
clearly better than what was there before is left out.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from rotationzoo.cache.windows import Cache
from rotationzoo.calibration.checkpoint import Checkpoint
from rotationzoo.calibration.search import samples as query_samples
from rotationzoo.calibration.search.clip import search_clip
from rotationzoo.calibration.search.layer import LayerSearch
from rotationzoo.calibration.search.samples import sample_queries, size_of, stored_rows
from rotationzoo.codec import int2
from rotationzoo.linalg.moments import Statistics
from rotationzoo.model.geometry import Geometry, Layer, cached_layers
from rotationzoo.model.projection import OutputProjection, output_projections
from rotationzoo.progress import Progress, silent
from rotationzoo.recipe import Recipe
from rotationzoo.rotations import Rotations

_LAYERS = 2 / 3  # of the time there is; the clip ratios of the whole model get the rest


def search(
    model: PreTrainedModel,
    geometry: Geometry,
    statistics: Statistics,
    baseline: Rotations,
    fitted: Sequence[torch.Tensor],
    held_out: Sequence[torch.Tensor],
    recipe: Recipe,
    deadline: float = math.inf,
    checkpoint: Checkpoint | None = None,
    progress: Progress = silent,
) -> tuple[Rotations, dict[str, Any]]:
    """The rotations to serve with, and a record of what was chosen and why.

    `baseline` are those of the recipe without a search, as `fit` makes them. `fitted` and
    `held_out` are token rows; learning uses the first, every choice the second, of which at least
    one is longer than the cache's windows. `deadline` (`time.monotonic()`) cuts learning short, and
    then the search for clip ratios; what every choice is scored on is not cut.
    """
    settings = recipe.search
    assert settings is not None
    cache = Cache(int2.FORMATS[settings.format], recipe.sink, recipe.recent)
    projections = output_projections(model, geometry)
    layers = cached_layers(geometry)
    chosen, record = checkpoint.read_search() if checkpoint is not None else ({}, {})
    left = [layer for layer in layers if str(layer.index) not in record]
    done = 2 * (len(layers) - len(left))
    begun = time.monotonic()
    layers_end = begun + _LAYERS * (deadline - begun)
    judged, taught = ([len(row) for row in rows] for rows in (held_out, fitted))
    hidden = model.config.get_text_config(decoder=True).hidden_size
    for group in _groups(
        left, [size_of(geometry, layer, settings, judged, taught, hidden) for layer in left]
    ):
        indices = {layer.index for layer in group}
        matrices, kept = _read(projections, indices)
        judge = sample_queries(
            model, geometry, held_out, cache, settings.queries, indices, matrices
        )
        matrices.clear()  # the samples hold what they need, until their layer is done
        learning = settings.steps > 0 and time.monotonic() < layers_end
        rows = (
            stored_rows(model, fitted, recipe.sink, indices, query_samples.LEARNING_TOKENS)
            if learning
            else {}
        )
        for layer in group:
            progress("searching", done, 2 * len(layers))
            # Popped: what a layer was chosen on is not needed once it is, least of all beside the
            # passes of `trim`.
            chooser = LayerSearch(
                layer,
                statistics[layer.index],
                recipe,
                baseline[layer.index],
                judge.pop(layer.index),
                rows.pop(layer.index, None),
            )
            key = chooser.keys(_pace(layers_end, 2 * len(layers) - done))
            progress("searching", done := done + 1, 2 * len(layers))
            value = chooser.values(key, _pace(layers_end, 2 * len(layers) - done))
            done += 1
            for name, side in (("key", key), ("value", value)):
                chosen[layer.index, name] = side.matrix.cpu().contiguous()
            record[str(layer.index)] = {
                "key": key.record,
                "value": value.record,
                "projection": kept[layer.index],
            }
            if checkpoint is not None:
                checkpoint.save_search(chosen, record)
    progress("searching", done, 2 * len(layers))
    searched = baseline.replace(
        lambda layer, side, rotation: replace(rotation, matrix=chosen[layer, side])
    )
    rotations, trimmed = search_clip(
        model, geometry, baseline, searched, cache, recipe.group_size, held_out, deadline, progress
    )
    return rotations, {"model": trimmed, "layers": record}


def _read(
    projections: Mapping[int, OutputProjection], owners: set[int]
) -> tuple[dict[int, torch.Tensor | None], dict[int, dict[str, str]]]:
    """The output projections of all layers that read the caches of `owners`; and by owner, how each
    of them was read."""
    matrices: dict[int, torch.Tensor | None] = {}
    kept: dict[int, dict[str, str]] = {owner: {} for owner in owners}
    for index, projection in projections.items():
        if (owner := projection.layer.owner) in owners:
            matrices[index], kept[owner][str(index)] = projection.read()
    return matrices, kept


def _groups(layers: Sequence[Layer], sizes: Sequence[int]) -> list[list[Layer]]:
    """Layers whose samples fit in memory together."""
    groups: list[list[Layer]] = []
    used = 0
    for layer, size in zip(layers, sizes, strict=True):
        if not groups or used + size > query_samples.SAMPLE_BYTES:
            groups.append([])
            used = 0
        groups[-1].append(layer)
        used += size
    return groups


def _pace(deadline: float, left: int) -> float:
    """When the next of `left` equal parts should be done."""
    now = time.monotonic()
    return now + max(0.0, deadline - now) / left
