"""Texts, samples and a model to search rotations on."""

import torch
from transformers import PreTrainedModel

from rotationzoo.cache.windows import Cache
from rotationzoo.calibration.collect import collect
from rotationzoo.calibration.fit import fit
from rotationzoo.calibration.search.draws import SamplingSettings
from rotationzoo.calibration.search.frame import Projections
from rotationzoo.calibration.search.query_samples import QuerySample
from rotationzoo.calibration.search.sampling import take_samples
from rotationzoo.calibration.search.shelf import Shelf
from rotationzoo.calibration.search.stored import Samples
from rotationzoo.calibration.search.task import SearchTask
from rotationzoo.model.geometry import Geometry, cached_layers, geometry_of
from rotationzoo.model.projection import output_projections
from rotationzoo.recipe import PRESETS, Recipe, Search
from support import architectures

# Plain, norms, windows, soft cap, sinks, shared caches.
FAMILIES = ["llama", "qwen3", "mistral", "gemma2", "gpt_oss", "gemma4"]
CACHE = Cache(sink=2, recent=4)
ROWS = list(torch.randint(3, 59, (6, 40), generator=torch.Generator().manual_seed(1)))


def search_recipe(**changes) -> Recipe:
    """The recipe `best` with the windows of `CACHE`, and a search as `changes` say. A job adds the
    factors of error feedback after its search, so the recipe does without them."""
    settings = Search(**{"queries": 8, **changes})
    changed = {"sink": 2, "recent": 4, "search": settings, "feedback": False}
    return PRESETS["best"].model_copy(update=changed)


def read_projections(model: PreTrainedModel, geometry: Geometry) -> Projections:
    """The output projection of every layer."""
    modules = output_projections(model, geometry)
    return {layer: projection.read()[0] for layer, projection in modules.items()}


def stored_samples(
    model: PreTrainedModel, queries: int = 8, rows=ROWS, fitted=(), batch: int = 1
) -> tuple[Geometry, Samples]:
    """Samples of every layer, as they are stored."""
    geometry = geometry_of(model)
    settings = SamplingSettings(rows, fitted, CACHE, queries, batch=batch)
    layers = cached_layers(geometry)
    return geometry, take_samples(model, geometry, layers, settings, Shelf(0))


def samples_of(
    model: PreTrainedModel, queries: int = 8, rows=ROWS
) -> tuple[Geometry, dict[int, list[QuerySample]]]:
    """Query samples of every layer."""
    geometry, stored = stored_samples(model, queries, rows)
    projections = read_projections(model, geometry)
    samples = {
        owner: [sample.load(projections[sample.layer]) for sample in of_layer.queries]
        for owner, of_layer in stored.items()
    }
    return geometry, samples


def task_for(model: PreTrainedModel, recipe: Recipe) -> SearchTask:
    """A search that is fitted to four rows and held against two."""
    geometry = geometry_of(model)
    statistics = collect(model, geometry, [torch.stack(ROWS[:4])], recipe)
    baseline = fit(statistics, recipe, geometry)
    return SearchTask(model, geometry, recipe, statistics, baseline, ROWS[:4], ROWS[4:])


def wide_channel_model() -> PreTrainedModel:
    """A model with channels of keys that are far wider than the rest, and read by queries that are
    as much narrower."""
    model = architectures.build("llama", head_dim=32)
    scale = torch.ones(32)
    scale[[3, 19, 5, 21]] = 8.0  # two RoPE pairs, so that logits stay as they are
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight *= scale.repeat(2)[:, None]
            query_heads = layer.self_attn.q_proj.out_features // 32
            layer.self_attn.q_proj.weight /= scale.repeat(query_heads)[:, None]
    return model
