"""What a calibration will do, known from the model's config alone: what is refused, what it reads, what it needs."""

import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from rotationzoo import artifact, checkpoint, models
from rotationzoo.artifact import Artifact
from rotationzoo.errors import RotationZooError, UnsupportedModel, as_unavailable
from rotationzoo.fit import check_recipe, settle_centering
from rotationzoo.geometry import Geometry, cached_layers, geometry_on_meta, shifted_layers
from rotationzoo.recipe import SELF, Recipe, digest, without_paths
from rotationzoo.sample import HELD, size_of
from rotationzoo.source import Source, find

_HEAP = 1.75  # of what is kept on a CPU, whose allocator leaves holes between it: 6.7 GB measured for 3.7 GB of samples


@dataclass(frozen=True)
class Job:
    """One calibration as the user asked for it."""

    model: str
    recipe: Recipe
    output: Path
    revision: str | None = None
    batch: int = 4
    device: str = "auto"
    dtype: str = "auto"
    device_map: str | None = None
    max_memory: str | None = None
    restart: bool = False
    budget: float | None = None
    """Minutes for a search: they end learning and the clip ratios, not what choices are scored on. None lets it finish."""
    fit_length: bool = False
    """Rows longer than the model has positions are cut to them, not refused: their length is the recipe's and nobody's wish."""

    def __post_init__(self) -> None:
        artifact.check_name(self.output)

    @property
    def checkpoint(self) -> Path:
        return self.output.with_name(self.output.name + ".checkpoint.safetensors")

    @property
    def unfinished(self) -> bool:
        """Whether a run of this output was stopped, and can go on."""
        return any(path.is_file() for path in checkpoint.files(self.checkpoint))

    @property
    def torch_device(self) -> str:
        return models.torch_device(self.device)

    @property
    def torch_dtype(self) -> torch.dtype | str:
        return models.torch_dtype(self.dtype, self.device, self.device_map)


@dataclass(frozen=True)
class Plan:
    """What is known of a job before a weight is read; `job` is the one to run, with rows that fit the model.

    `config` and `geometry` are None if the model is refused; `geometry` also if only the weights can tell. Sizes in bytes,
    estimated.
    """

    job: Job
    source: Source
    config: PretrainedConfig | None
    geometry: Geometry | None
    refusal: UnsupportedModel | None
    weights_bytes: int = 0
    artifact_bytes: int = 0
    peak_memory_bytes: int = 0
    notes: tuple[str, ...] = ()
    """Where the job to run is not the one that was asked for, and why."""


def plan(job: Job) -> Plan:
    """Look at the model on `meta` and hold the job against it.

    Raises `ModelUnavailable` where there is no such model and `RotationZooError` where the job cannot be honoured. A model that
    cannot be calibrated is no error here: it is the plan's `refusal`.
    """
    models.memory_limits(job.device_map, job.max_memory)
    source = find(job.model, job.revision)
    try:
        config = models.load_config(source)
        model = models.on_meta(config, source.name)
        with as_unavailable(f"{source.name} fails when it runs"):
            geometry = geometry_on_meta(model)
    except UnsupportedModel as refusal:
        return Plan(job, source, None, None, refusal)
    job = _fitting(job, config) if job.fit_length else job
    recipe, notes = settle_centering(job.recipe, shifted_layers(geometry or []))
    job = replace(job, recipe=recipe)
    check_recipe(job.recipe, geometry or [])
    _check_length(job.recipe, config)
    weights = models.weights_bytes(source, model)
    rotations, statistics = _rotation_bytes(job.recipe, geometry or []), _statistics_bytes(job.recipe, geometry or [])
    peak = rotations
    if job.recipe.needs_statistics:
        loaded = 4 * model.num_parameters() if job.torch_dtype == torch.float32 else weights
        activations = _activation_bytes(job, model, geometry or [])
        writing = _cache_bytes(job, geometry or [])
        searching = _search_bytes(job, model, geometry or []) + _activation_bytes(replace(job, batch=1), model, geometry or [])
        peak += loaded + 2 * statistics + max(activations, writing, searching)
    return Plan(job, source, config, geometry, None, weights, rotations + statistics, peak, tuple(notes))


def _fitting(job: Job, config: PretrainedConfig) -> Job:
    """The job with rows no longer than the model has positions."""
    data, positions = job.recipe.data, _positions(config)
    if positions is None or data.length <= positions:
        return job
    return replace(job, recipe=job.recipe.model_copy(update={"data": data.model_copy(update={"length": positions})}))


def _positions(config: PretrainedConfig) -> int | None:
    positions = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return positions if isinstance(positions, int) else None


def _check_length(recipe: Recipe, config: PretrainedConfig) -> None:
    if not recipe.needs_statistics:
        return
    length, data = recipe.data.length, recipe.data
    positions = _positions(config)
    if positions is not None and length > positions:
        raise RotationZooError(
            f"rows of {length} tokens are longer than the {positions} positions of the model",
            hint=f"add: --length {positions}",
        )
    if data.source == SELF and data.prompt_tokens >= length:
        raise RotationZooError(
            f"prompts of {data.prompt_tokens} tokens leave nothing to write in rows of {length}",
            hint="give longer rows with --length",
        )
    if recipe.exclude_sink and length <= recipe.sink:
        raise RotationZooError(
            f"rows of {length} tokens leave nothing past the {recipe.sink} sink tokens", hint="give longer rows with --length"
        )
    if data.packing != "document" and not data.row_lengths:
        raise RotationZooError(
            f"{data.tokens} tokens are less than one row of {length}",
            hint=f"ask for at least --tokens {length}, or for shorter rows with --length",
        )


def check_output(job: Job) -> None:
    """The output can be written, and what is there may be replaced."""
    with artifact.disk_errors(job.output):
        artifact.recover(job.output)
        artifact.check_replaceable(job.output)
        if (job.output / artifact.MANIFEST).is_file():
            _check_recipe_of(job, Artifact.open(job.output))
        if job.output.parent.exists():
            with artifact.temporary_sibling(job.output):
                pass
        else:  # nothing of this job's name: other jobs may have the same, in other folders that are not there yet
            tempfile.TemporaryDirectory(dir=_ancestor(job.output)).cleanup()


def _check_recipe_of(job: Job, there: Artifact) -> None:
    """Work of another recipe is replaced only when asked to, or when a run that was asked to goes on."""
    # What was asked for, which is not what was done where only the weights told that keys cannot be centred.
    if asked_recipe(there.manifest) != job.recipe.hash and not job.restart and not job.unfinished:
        theirs = f"{there.manifest['recipe'].get('name')} for {there.manifest['model'].get('id')}"
        raise RotationZooError(
            f"{job.output} holds the work of another recipe ({theirs})",
            hint="choose another place with --output, or replace it with --restart",
        )


def asked_recipe(manifest: dict[str, Any]) -> str:
    """The hash of the recipe that an artifact was made by, without the paths that earlier versions wrote into it."""
    written = manifest["identity"].get("recipe", manifest["recipe_sha256"])
    return digest(without_paths(manifest["recipe"])) if written == manifest["recipe_sha256"] else written


def check_room(job: Job, known: Plan) -> None:
    # The artifact, and a checkpoint beside it.
    free, needed = shutil.disk_usage(_ancestor(job.output)).free, 2 * known.artifact_bytes
    if free < needed:
        raise RotationZooError(
            f"the disk of {job.output} has {free / 1e6:,.0f} MB free and {needed / 1e6:,.0f} MB are needed",
            hint="make room, or choose another place with --output",
        )


def _ancestor(path: Path) -> Path:
    """The nearest folder above that is there already."""
    return next(folder for folder in path.absolute().parents if folder.exists())


def _statistics_bytes(recipe: Recipe, geometry: Geometry) -> int:
    """Four second moments a layer, five with key energy, in float64."""
    if not recipe.needs_statistics:
        return 0
    energy = 1 if recipe.value_statistic == "key_energy" else 0
    layers = cached_layers(geometry)
    return sum(8 * layer.kv_heads * (2 * layer.key_dim**2 + (2 + energy) * layer.value_dim**2) for layer in layers)


def _rotation_bytes(recipe: Recipe, geometry: Geometry) -> int:
    layers = cached_layers(geometry)
    heads = (1 if recipe.pooling == "layer" else layer.kv_heads for layer in layers)
    return sum(4 * h * (layer.key_dim**2 + layer.value_dim**2) for h, layer in zip(heads, layers, strict=True))


def _cache_bytes(job: Job, geometry: Geometry) -> int:
    """The key/value cache of a batch that the model writes."""
    if job.recipe.data.source != SELF:
        return 0
    width = sum(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in cached_layers(geometry))
    return job.batch * job.recipe.data.length * width * _item(job)


def _search_bytes(job: Job, model: PreTrainedModel, geometry: Geometry) -> int:
    recipe = job.recipe
    if recipe.search is None:
        return 0
    lengths = recipe.data.row_lengths  # of documents, whose lengths nobody knows before they are read, an upper limit
    held_out = recipe.search.held_out(len(lengths))
    judged, taught = lengths[len(lengths) - held_out :], lengths[: len(lengths) - held_out]
    hidden = model.config.get_text_config(decoder=True).hidden_size
    sizes = [size_of(geometry, layer, recipe.search, judged, taught, hidden) for layer in cached_layers(geometry)]
    held = max(max(sizes, default=0), min(HELD, sum(sizes)))
    return int(_HEAP * held) if job.torch_device == "cpu" else held


def _activation_bytes(job: Job, model: PreTrainedModel, geometry: Geometry) -> int:
    """What one batch holds at its widest: the residual stream, one layer's projections, the float64 copy of one row and,
    under eager attention, the scores; plus the libraries themselves, whose memory counts on a CPU."""
    text = model.config.get_text_config(decoder=True)
    length, tokens = job.recipe.data.length, job.recipe.data.length * job.batch
    item = _item(job)
    widest = max((layer.query_heads * (layer.key_dim + layer.value_dim) for layer in geometry), default=0)
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    projections = 3 * tokens * item * max(widest, inner if isinstance(inner, int) else max(inner))
    heads = max((layer.query_heads for layer in geometry), default=0)
    scores = 3 * 4 * tokens * length * heads if text._attn_implementation == "eager" else 0
    libraries = 400_000_000 if job.torch_device == "cpu" else 0
    return 4 * tokens * text.hidden_size * item + projections + 2 * 8 * length * widest + scores + libraries


def _item(job: Job) -> int:
    """Bytes of an activation."""
    return 4 if job.torch_dtype == torch.float32 else 2
