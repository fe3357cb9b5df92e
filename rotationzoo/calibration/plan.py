"""What a calibration will do, known from the model's config alone: what is refused, what it reads,
what it needs."""

import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PretrainedConfig

from rotationzoo.artifact.store import MANIFEST, Artifact
from rotationzoo.artifact.writer import check_replaceable
from rotationzoo.calibration import checkpoint, memory
from rotationzoo.calibration.fit import check_recipe, settle_centering
from rotationzoo.calibration.memory import Footprint
from rotationzoo.errors import RotationZooError, UnsupportedModel, as_unavailable
from rotationzoo.model import loading
from rotationzoo.model.geometry import Geometry, geometry_on_meta, shifted_layers
from rotationzoo.model.placement import memory_limits, weights_bytes
from rotationzoo.model.source import Source, find
from rotationzoo.recipe import SELF, Recipe, digest, without_paths
from rotationzoo.storage import files, folders
from rotationzoo.storage.files import disk_errors


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
    """Minutes for a search: they end learning and the clip ratios, not what choices are scored on.
    None lets it finish."""
    fit_length: bool = False
    """Rows longer than the model has positions are cut to them, not refused: their length is the
    recipe's and nobody's wish."""

    def __post_init__(self) -> None:
        folders.check_name(self.output)

    @property
    def checkpoint(self) -> Path:
        return self.output.with_name(self.output.name + ".checkpoint.safetensors")

    @property
    def lock(self) -> Path:
        return self.checkpoint.with_name(f".{self.checkpoint.name}.lock")

    @property
    def unfinished(self) -> bool:
        """Whether a run of this output was stopped, and can go on."""
        return any(files.size_of(path) is not None for path in checkpoint.files(self.checkpoint))

    @property
    def torch_device(self) -> str:
        return loading.torch_device(self.device)

    @property
    def torch_dtype(self) -> torch.dtype | str:
        return loading.torch_dtype(self.dtype, self.device, self.device_map)


@dataclass(frozen=True)
class Plan:
    """What is known of a job before a weight is read; `job` is the one to run, with rows that fit
    the model.

    `config` and `geometry` are None if the model is refused; `geometry` also if only the weights
    can tell. Sizes in bytes, estimated.
    """

    job: Job
    source: Source
    config: PretrainedConfig | None
    geometry: Geometry | None
    refusal: UnsupportedModel | None
    weights_bytes: int = 0
    artifact_bytes: int = 0
    peak_memory_bytes: int = 0
    memory_bytes: int = 0
    """What this machine has where the job would run."""
    notes: tuple[str, ...] = ()
    """Where the job to run is not the one that was asked for, and why."""


def plan(job: Job) -> Plan:
    """Look at the model on `meta` and hold the job against it.

    Raises `ModelUnavailable` where there is no such model and `RotationZooError` where the job
    cannot be honoured. A model that cannot be calibrated is no error here: it is the plan's
    `refusal`.
    """
    memory_limits(job.device_map, job.max_memory)
    source = find(job.model, job.revision)
    try:
        config = loading.load_config(source)
        model = loading.on_meta(config, source.name)
        with as_unavailable(f"{source.name} fails when it runs"):
            geometry = geometry_on_meta(model)
    except UnsupportedModel as refusal:
        return Plan(job, source, None, None, refusal)
    job = _fitting(job, config) if job.fit_length else job
    recipe, notes = settle_centering(job.recipe, shifted_layers(geometry or []))
    job = replace(job, recipe=recipe)
    check_recipe(job.recipe, geometry or [])
    _check_length(job.recipe, config)
    weights = weights_bytes(source, model)
    dtype, loaded = job.torch_dtype, weights
    if isinstance(dtype, str) or getattr(config, "quantization_config", None):  # the makers' own
        dtype = getattr(config.get_text_config(decoder=True), "dtype", None) or torch.bfloat16
    else:
        loaded = dtype.itemsize * model.num_parameters()
    item = dtype.itemsize
    on_cpu = job.torch_device == "cpu"
    needs = Footprint(job.recipe, geometry or [], model.config, job.batch, item, on_cpu)
    here = memory.present(on_cpu, job.device_map is not None)
    written = needs.rotations + needs.statistics
    return Plan(
        job,
        source,
        config,
        geometry,
        None,
        weights,
        written,
        needs.peak(loaded),
        here,
        tuple(notes),
    )


def _fitting(job: Job, config: PretrainedConfig) -> Job:
    """The job with rows no longer than the model has positions."""
    data, positions = job.recipe.data, _positions(config)
    if positions is None or data.length <= positions:
        return job
    return replace(
        job,
        recipe=job.recipe.model_copy(
            update={"data": data.model_copy(update={"length": positions})}
        ),
    )


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
            f"rows of {length} tokens leave nothing past the {recipe.sink} sink tokens",
            hint="give longer rows with --length",
        )
    if data.packing != "document" and not data.row_lengths:
        raise RotationZooError(
            f"{data.tokens} tokens are less than one row of {length}",
            hint=f"ask for at least --tokens {length}, or for shorter rows with --length",
        )


def check_output(job: Job) -> None:
    """The output can be written, and what is there may be replaced."""
    with disk_errors(job.output):
        folders.recover(job.output)
        check_replaceable(job.output)
        if (job.output / MANIFEST).is_file():
            _check_recipe_of(job, Artifact.open(job.output))
        if job.output.parent.exists():
            with folders.temporary_sibling(job.output):
                pass
        # nothing of this job's name: other jobs may have the same, in other folders that are not
        # there yet
        else:
            tempfile.TemporaryDirectory(dir=_ancestor(job.output)).cleanup()


def _check_recipe_of(job: Job, artifact: Artifact) -> None:
    """Work of another recipe is replaced only when asked to, or when a run that was asked to goes
    on."""
    # What was asked for, which is not what was done where only the weights told that keys cannot be
    # centred.
    if asked_recipe(artifact) != job.recipe.hash and not job.restart and not job.unfinished:
        theirs = f"{artifact.recipe.name} for {artifact.manifest.model.id}"
        raise RotationZooError(
            f"{job.output} holds the work of another recipe ({theirs})",
            hint="choose another place with --output, or replace it with --restart",
        )


def asked_recipe(artifact: Artifact) -> str:
    """The hash of the recipe that an artifact was made by, without the paths that earlier versions
    wrote into it."""
    manifest = artifact.manifest
    written = str(manifest.identity.get("recipe", manifest.recipe_sha256))
    return digest(without_paths(manifest.recipe)) if written == manifest.recipe_sha256 else written


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
