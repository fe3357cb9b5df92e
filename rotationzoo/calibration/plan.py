"""A calibration job, and its plan from the config: refusals, adapted recipes, memory and disk."""

import re
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PretrainedConfig, PreTrainedModel

from rotationzoo.artifact.store import MANIFEST
from rotationzoo.calibration import memory as memories
from rotationzoo.calibration.soundness import check_recipe
from rotationzoo.codec.engine_needs import DEFAULT
from rotationzoo.errors import RotationZooError, UnsupportedModel
from rotationzoo.geometry import Geometry, shift_reason, shifted_layers
from rotationzoo.model import loading
from rotationzoo.model.files import check_engine, is_gguf
from rotationzoo.model.geometry import geometry_on_meta
from rotationzoo.model.placement import memory_limits, weights_bytes
from rotationzoo.model.quantized import check_loadable, is_dequantized, quantization_of
from rotationzoo.model.source import Source, find
from rotationzoo.recipe import Recipe
from rotationzoo.recipe.rope import check_positions, position_count
from rotationzoo.settings import RunSettings
from rotationzoo.storage import files, folders, strict_json
from rotationzoo.text.media import media_tokens
from rotationzoo.words import counted

_STATED = {"batch": "[1-9][0-9]{0,6}", "date": "[0-9]{4}(-[0-9]{2}){2}"}


@dataclass(frozen=True)
class Job(RunSettings):
    """A calibration as the user asked for it."""

    model: str
    recipe: Recipe
    output: Path
    batch: int = 4
    """Rows per forward pass; `SIZED` leaves them to the plan."""
    engine: str = DEFAULT
    """The engine that the rotations are for."""
    restart: bool = False
    fit_length: bool = False
    """Whether rows that are too long are shortened, not refused: if the length is the default."""
    """The model that the caller loaded."""
    asked_tokens: tuple[float, float] = (0, 0)
    """What questions read after it, at least and at most, counted as tokens of the exact model."""

    def __post_init__(self) -> None:
        folders.check_name(self.output)

    @property
    def checkpoint(self) -> Path:
        """The checkpoint, next to the output."""
        return self.output.with_name(self.output.name + ".checkpoint.safetensors")

    @property
    def lock(self) -> Path:
        """The lock file that keeps other jobs away from the checkpoint and the output."""
        return self.checkpoint.with_name(f".{self.checkpoint.name}.lock")

    def earlier(self, key: str) -> str | None:
        """The batch or date of the run whose checkpoint or artifact is there, or None. A sum needs
        the same ones to go on, and free memory and today change."""
        identities: list[Any] = [files.read_json(self.output / MANIFEST).get("identity")]
        # No checkpoint, or a damaged one, which is refused when it is read.
        with suppress(Exception), safe_open(self.checkpoint, "pt") as file:
            stored = file.metadata()["identity"]
            identities.insert(0, strict_json.parse(stored, str(self.checkpoint)))
        for identity in identities:
            value = identity.get(key) if isinstance(identity, dict) else None
            if isinstance(value, str) and re.fullmatch(_STATED[key], value) and not self.restart:
                return value
        return None

    @property
    def unfinished(self) -> bool:
        """Whether an earlier run for this output was stopped and can be resumed."""
        return files.size_of(self.checkpoint) is not None


@dataclass(frozen=True)
class Plan:
    """A job as it is known before any weights are read, with rows that fit the model.

    `config` and `geometry` are None for a refused model; `geometry` also if only weights can tell.
    """

    job: Job
    source: Source
    config: PretrainedConfig | None
    geometry: Geometry | None
    refusal: UnsupportedModel | None
    weights_bytes: int = 0
    artifact_bytes: int = 0
    pass_bytes: int = 0
    """Memory that a forward pass takes besides the weights where the layers run, with the sums."""
    peak_memory_bytes: int = 0
    memory_bytes: int = 0
    """Memory that this machine has where the job would run."""
    notes: tuple[str, ...] = ()
    """How the job to run differs from the one that was asked for, and why."""

    @property
    def needs_weights(self) -> bool:
        """Whether the job needs the weights, and not only the config."""
        return self.job.recipe.needs_statistics or self.geometry is None


def plan(job: Job) -> Plan:
    """Inspect the model on the `meta` device and check the job against it.

    Raises `ModelUnavailable` if there is no such model, and `RotationZooError` if the job cannot be
    done as asked. A model that cannot be calibrated raises nothing: the plan's `refusal` says why.
    """
    memory_limits(job.device_map, job.max_memory)
    source = find(job.model, job.revision)
    try:
        config = loading.load_config(source, job.recipe.rope_scaling)
        if job.recipe.data.media:
            setattr(config, loading.READS_MEDIA, True)
        if job.recipe.needs_statistics:
            check_loadable(config, source.name, job.torch_device)
        model = loading.on_meta(config, source.name)
        geometry = geometry_on_meta(model)
    except UnsupportedModel as refusal:
        return Plan(job, source, None, None, refusal)
    recipe = shorten_rows(job.recipe, config) if job.fit_length else job.recipe
    recipe, notes = settle_centering(recipe, geometry or [])
    check_engine(source.folder, job.engine)
    check_recipe(recipe, geometry or [])
    check_length(recipe, config)
    media_tokens(config, recipe.data, source.name)  # for its error
    job = replace(job, recipe=recipe, batch=1 if recipe.data.media else job.batch)
    return _with_sizes(Plan(job, source, config, geometry, None, notes=tuple(notes)), model)


def settle_centering(recipe: Recipe, geometry: Geometry) -> tuple[Recipe, list[str]]:
    """The recipe, whose keys keep their mean if attention in some layers needs it, and notes."""
    layers = shifted_layers(geometry)
    if not recipe.center_keys or not layers:
        return recipe, []
    note = f"keys keep their mean, although the recipe {recipe.name} centers them"
    note = f"{note}: {shift_reason(layers)}"
    return recipe.model_copy(update={"center_keys": False}), [note]


USUAL_LENGTH = 2048
"""Tokens of a row where there are fewer than the preset's rows would take."""


def shorten_rows(recipe: Recipe, config: PretrainedConfig) -> Recipe:
    """The recipe, with rows no longer than the model's positions, its tokens or `USUAL_LENGTH`."""
    data = recipe.data
    length = min(data.length, max(data.tokens, USUAL_LENGTH), position_count(config) or data.length)
    if length == data.length:
        return recipe
    return recipe.model_copy(update={"data": data.model_copy(update={"length": length})})


def check_length(recipe: Recipe, config: PretrainedConfig) -> None:
    """Raise `RotationZooError` if the recipe's rows are too long for the model or too short."""
    if not recipe.needs_statistics:
        return
    length, data = recipe.data.length, recipe.data
    check_positions(config, length, "rows", "add: --length {}")
    if recipe.exclude_sink and length <= recipe.sink:
        problem = f"rows of {length} tokens leave nothing past the {recipe.sink} sink tokens"
        raise RotationZooError(problem, "give longer rows with --length")
    if not data.media and not data.rows:
        problem = f"{counted(data.tokens, 'token')} cannot fill one row of {length:,}"
        hint = f"ask for at least --tokens {length}, or for shorter rows with --length"
        raise RotationZooError(problem, hint)


def _with_sizes(known: Plan, model: PreTrainedModel) -> Plan:
    """The plan with its size estimates; `model` is on `meta`."""
    job = known.job
    assert known.config is not None
    stored = weights_bytes(known.source, model)
    dtype = job.torch_dtype
    quantized = quantization_of(known.config) is not None
    loads_stored = quantized or not isinstance(dtype, torch.dtype)
    if loads_stored:  # activations use the config's dtype
        text_config = known.config.get_text_config(decoder=True)
        dtype = getattr(text_config, "dtype", None) or torch.bfloat16
    assert isinstance(dtype, torch.dtype)
    loaded = stored
    dequantized = is_dequantized(known.config) or is_gguf(known.source.folder)
    if not loads_stored or dequantized:
        loaded = dtype.itemsize * model.num_parameters()
    on_cpu = job.torch_device == "cpu"
    memory = memories.total_memory(on_cpu, spread=job.device_map is not None)
    needs = memories.Footprint(
        recipe=job.recipe,
        geometry=known.geometry or [],
        config=model.config,
        batch=job.batch,
        item=dtype.itemsize,
        on_cpu=on_cpu,
    )
    if job.batch == memories.SIZED:
        limits = memory_limits(job.device_map, job.max_memory)
        batch = job.earlier("batch") or memories.choose_batch(needs, loaded, limits)
        job = replace(job, batch=int(batch))
        needs = replace(needs, batch=job.batch)
    return replace(
        known,
        job=job,
        pass_bytes=needs.pass_bytes(job.batch),
        weights_bytes=stored,
        artifact_bytes=needs.rotations + needs.statistics,
        peak_memory_bytes=needs.peak(loaded),
        memory_bytes=memory,
    )
