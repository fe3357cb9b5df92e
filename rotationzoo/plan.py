"""What a calibration will do, known from the model's config alone: what is refused, what it reads, what it needs."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PretrainedConfig

from rotationzoo import artifact, models
from rotationzoo.artifact import Artifact
from rotationzoo.errors import RotationZooError, UnsupportedModel, UsageError
from rotationzoo.fit import check_recipe
from rotationzoo.geometry import Geometry, cached_layers, geometry_on_meta
from rotationzoo.recipe import Recipe
from rotationzoo.source import Source, find


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

    def __post_init__(self) -> None:
        if self.output.name in ("", ".."):
            raise UsageError(f"{self.output} cannot be replaced by an artifact", hint="name a new folder with --output")

    @property
    def checkpoint(self) -> Path:
        return self.output.with_name(self.output.name + ".checkpoint.safetensors")

    @property
    def torch_device(self) -> str:
        """`auto` is the accelerator where there is one. Raises `UsageError` for one that is not there."""
        if self.device == "auto":
            return "cuda" if torch.cuda.is_available() else "cpu"
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UsageError("this machine has no CUDA device, or this torch was built without CUDA", hint="--device cpu")
        return self.device

    @property
    def torch_dtype(self) -> torch.dtype | str:
        """`auto` is the checkpoint's own type on an accelerator or spread over devices, and float32 on a CPU alone."""
        if self.dtype != "auto":
            return getattr(torch, self.dtype)
        return torch.float32 if self.torch_device == "cpu" and self.device_map is None else "auto"


@dataclass(frozen=True)
class Plan:
    """What is known of a job before a weight is read.

    `geometry` is None if the model is refused, or if only its weights can tell. Sizes in bytes, estimated.
    """

    source: Source
    config: PretrainedConfig
    geometry: Geometry | None
    refusal: UnsupportedModel | None
    weights_bytes: int
    artifact_bytes: int
    peak_memory_bytes: int


def plan(job: Job) -> Plan:
    """Look at the model on `meta` and hold the job against it.

    Raises `ModelUnavailable` where there is no such model and `RotationZooError` where the job cannot be honoured. A model that
    cannot be calibrated is no error here: it is the plan's `refusal`.
    """
    source = find(job.model, job.revision)
    config = models.load_config(source)
    model = models.on_meta(config, source.name)
    geometry, refusal = None, None
    try:
        geometry = geometry_on_meta(model)
    except UnsupportedModel as error:
        refusal = error
    if refusal is None:
        check_recipe(job.recipe, geometry or [])
        _check_length(job.recipe, config)
    weights = models.weights_bytes(source, model)
    statistics = _statistics_bytes(geometry or [])
    loaded = 4 * model.num_parameters() if job.torch_dtype == torch.float32 else weights
    peak = loaded + 2 * statistics + _activation_bytes(job, config, geometry or [])
    return Plan(source, config, geometry, refusal, weights, statistics + _rotation_bytes(geometry or []), peak)


def _check_length(recipe: Recipe, config: PretrainedConfig) -> None:
    if not recipe.needs_statistics:
        return
    length, data = recipe.data.length, recipe.data
    positions = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if isinstance(positions, int) and length > positions:
        raise RotationZooError(
            f"rows of {length} tokens are longer than the {positions} positions of the model",
            hint=f"add: --length {positions}",
        )
    if recipe.exclude_sink and length <= recipe.sink:
        raise RotationZooError(
            f"rows of {length} tokens leave nothing past the {recipe.sink} sink tokens", hint="give longer rows with --length"
        )
    if data.packing == "packed" and data.tokens < length:
        raise RotationZooError(
            f"{data.tokens} tokens are less than one row of {length}",
            hint=f"ask for at least --tokens {length}, or for shorter rows with --length",
        )


def check_output(job: Job) -> None:
    """The output can be written, and what is there may be replaced."""
    is_artifact = (job.output / artifact.MANIFEST).is_file()
    if is_artifact and not job.restart:
        theirs = Artifact.open(job.output).manifest
        if theirs["recipe_sha256"] != job.recipe.hash:
            raise RotationZooError(
                f"{job.output} holds the work of another recipe ({theirs['recipe']['name']} for {theirs['model']['id']})",
                hint="choose another place with --output, or replace it with --restart",
            )
    elif not is_artifact and job.output.exists() and not (job.output.is_dir() and not any(job.output.iterdir())):
        raise RotationZooError(f"{job.output} exists and is no artifact", hint="choose another place with --output")
    with artifact.disk_errors(job.output), artifact.temporary_sibling(_ancestor(job.output) / job.output.name):
        pass


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


def _statistics_bytes(geometry: Geometry) -> int:
    return sum(8 * 2 * layer.kv_heads * (layer.key_dim**2 + layer.value_dim**2) for layer in cached_layers(geometry))


def _rotation_bytes(geometry: Geometry) -> int:
    return sum(4 * layer.kv_heads * (layer.key_dim**2 + layer.value_dim**2) for layer in cached_layers(geometry))


def _activation_bytes(job: Job, config: PretrainedConfig, geometry: Geometry) -> int:
    """What one batch holds at its widest: the residual stream, one layer's projections, the float64 copy of one row and,
    under eager attention, its scores; plus the libraries themselves."""
    text = config.get_text_config(decoder=True)
    length, tokens = job.recipe.data.length, job.recipe.data.length * job.batch
    item = 4 if job.torch_dtype == torch.float32 else 2
    widest = max((layer.query_heads * (layer.key_dim + layer.value_dim) for layer in geometry), default=0)
    hidden, inner = text.hidden_size, getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    projections = tokens * item * max(3 * widest, 3 * (inner if isinstance(inner, int) else max(inner)))
    libraries = 400_000_000 if job.torch_device == "cpu" else 0
    return 4 * tokens * hidden * item + projections + 2 * 8 * length * widest + libraries
