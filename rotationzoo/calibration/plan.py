"""A calibration job, and what is known of it from the model's config alone: whether it is refused,
what it reads, what it needs."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel

from rotationzoo.calibration.checkpoint import checkpoint_files
from rotationzoo.calibration.machine import total_memory
from rotationzoo.calibration.memory import Footprint
from rotationzoo.calibration.recipe_checks import (
    check_length,
    check_recipe,
    settle_centering,
    shorten_rows,
)
from rotationzoo.errors import UnsupportedModel, as_unavailable
from rotationzoo.model import loading
from rotationzoo.model.geometry import Geometry, geometry_on_meta, shifted_layers
from rotationzoo.model.placement import memory_limits, weights_bytes
from rotationzoo.model.source import Source, find
from rotationzoo.recipe import Recipe
from rotationzoo.storage import files, folders


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
    """Whether rows longer than the model has positions are cut to them instead of refused: where
    the length is the recipe's default, not the user's choice."""

    def __post_init__(self) -> None:
        folders.check_name(self.output)

    @property
    def checkpoint(self) -> Path:
        """The main file of the checkpoint, beside the output."""
        return self.output.with_name(self.output.name + ".checkpoint.safetensors")

    @property
    def lock(self) -> Path:
        """The lock file that keeps other jobs from the checkpoint and the output."""
        return self.checkpoint.with_name(f".{self.checkpoint.name}.lock")

    @property
    def unfinished(self) -> bool:
        """Whether a run of this output was stopped, and can go on."""
        return any(files.size_of(path) is not None for path in checkpoint_files(self.checkpoint))

    @property
    def torch_device(self) -> str:
        """The device to run on, `auto` resolved."""
        return loading.torch_device(self.device)

    @property
    def torch_dtype(self) -> torch.dtype | str:
        """The type to load weights in; `auto` is the checkpoint's own."""
        return loading.torch_dtype(self.dtype, self.device, self.device_map)


@dataclass(frozen=True)
class Plan:
    """What is known of a job before a weight is read; `job` is the one to run, with rows that fit
    the model.

    `config` and `geometry` are None if the model is refused; `geometry` also if only the weights
    can tell. Sizes are estimates in bytes.
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

    @property
    def needs_weights(self) -> bool:
        """Whether the job cannot be done from the config alone."""
        return self.job.recipe.needs_statistics or self.geometry is None


def plan(job: Job) -> Plan:
    """Look at the model on `meta` and check the job against it.

    Raises `ModelUnavailable` where there is no such model and `RotationZooError` where the job
    cannot be done as asked. A model that cannot be calibrated is no error here: it is the plan's
    `refusal`.
    """
    memory_limits(job.device_map, job.max_memory)  # for its errors
    source = find(job.model, job.revision)
    try:
        config = loading.load_config(source)
        model = loading.on_meta(config, source.name)
        with as_unavailable(f"{source.name} fails when it runs"):
            geometry = geometry_on_meta(model)
    except UnsupportedModel as refusal:
        return Plan(job, source, None, None, refusal)
    recipe = shorten_rows(job.recipe, config) if job.fit_length else job.recipe
    recipe, notes = settle_centering(recipe, shifted_layers(geometry or []))
    check_recipe(recipe, geometry or [])
    check_length(recipe, config)
    job = replace(job, recipe=recipe)
    known = Plan(job, source, config, geometry, None, notes=tuple(notes))
    return _with_sizes(known, model)


def _with_sizes(known: Plan, model: PreTrainedModel) -> Plan:
    """The plan with its estimates; `model` is on `meta`."""
    job = known.job
    assert known.config is not None
    stored = weights_bytes(known.source, model)
    dtype = job.torch_dtype
    if isinstance(dtype, torch.dtype) and not getattr(known.config, "quantization_config", None):
        loaded = dtype.itemsize * model.num_parameters()
    else:  # weights in the type that their makers chose, with activations in the config's
        text_config = known.config.get_text_config(decoder=True)
        dtype = getattr(text_config, "dtype", None) or torch.bfloat16
        loaded = stored
    on_cpu = job.torch_device == "cpu"
    needs = Footprint(
        recipe=job.recipe,
        geometry=known.geometry or [],
        config=model.config,
        batch=job.batch,
        item=dtype.itemsize,
        on_cpu=on_cpu,
    )
    return replace(
        known,
        weights_bytes=stored,
        artifact_bytes=needs.rotations + needs.statistics,
        peak_memory_bytes=needs.peak(loaded),
        memory_bytes=total_memory(on_cpu, spread=job.device_map is not None),
    )
