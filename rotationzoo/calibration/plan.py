"""A calibration job, and what the model's config alone tells about it.

That is whether the job is refused, what it reads, how its recipe is adapted where that is allowed,
and how much memory and disk it needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PretrainedConfig, PreTrainedModel

from rotationzoo.calibration.checkpoint import checkpoint_files, rank_files
from rotationzoo.calibration.memory import (
    SIZED,
    Footprint,
    choose_batch,
    earlier_batch,
    total_memory,
)
from rotationzoo.errors import RotationZooError, UnsupportedModel, as_unavailable
from rotationzoo.linalg import compositions
from rotationzoo.model import centering, loading
from rotationzoo.model.geometry import (
    Geometry,
    check_group_size,
    geometry_on_meta,
    head_dims,
    shifted_layers,
)
from rotationzoo.model.key_scales import with_equalizing
from rotationzoo.model.loading import RunSettings
from rotationzoo.model.placement import weights_bytes
from rotationzoo.model.quantized import check_loadable, is_dequantized, quantization_of
from rotationzoo.model.rope import longer_rows_hint, position_count
from rotationzoo.model.source import Source, find
from rotationzoo.recipe import SELF, Recipe
from rotationzoo.storage import files, folders
from rotationzoo.words import counted

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def check_recipe(recipe: Recipe, geometry: Geometry) -> None:
    """Raise `RotationZooError` if the recipe's composition does not exist for a head dimension.

    Either there is no Hadamard matrix of that order, or the quantization groups do not divide the
    dimension. The composition `given` is refused too.
    """
    if recipe.composition == compositions.GIVEN:
        raise RotationZooError(
            "the composition 'given' stands for imported matrices and cannot be calibrated",
            hint="leave composition out of the recipe, or see docs/recipes.md for those that can",
        )
    dims = head_dims(geometry)
    check_group_size(recipe.group_size, dims)
    # Build the rotations only for the errors that it raises.
    for dim in sorted(dims):
        if recipe.has_eigenbasis:
            identity = compositions.identity(dim)
            compositions.compose(identity, recipe.composition, recipe.group(dim))
        else:
            compositions.data_free(dim, recipe.composition, seed=0)


def settle_centering(recipe: Recipe, layers: Sequence[int]) -> tuple[Recipe, list[str]]:
    """The recipe for a model in which subtracting a mean from all keys changes the attention of
    `layers`: keys keep their mean. Also returns notes for the user."""
    if not recipe.center_keys or not layers:
        return recipe, []
    reason = centering.reason(layers)
    note = f"keys keep their mean, although the recipe {recipe.name} centers them: {reason}"
    return recipe.model_copy(update={"center_keys": False}), [note]


def shorten_rows(recipe: Recipe, config: "PretrainedConfig") -> Recipe:
    """The recipe, with rows cut to the number of positions that the model has."""
    positions = position_count(config)
    if positions is None or recipe.data.length <= positions:
        return recipe
    data = recipe.data.model_copy(update={"length": positions})
    return recipe.model_copy(update={"data": data})


def check_length(recipe: Recipe, config: "PretrainedConfig") -> None:
    """Raise `RotationZooError` if the recipe's rows are too long for the model, or too short to be
    useful."""
    if not recipe.needs_statistics:
        return
    length, data = recipe.data.length, recipe.data
    positions = position_count(config)
    if positions is not None and length > positions:
        raise RotationZooError(
            f"rows of {length} tokens are longer than the {positions} positions of the model",
            hint=longer_rows_hint(config, length, f"add: --length {positions}"),
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
            f"{counted(data.tokens, 'token')} cannot fill one row of {length:,}",
            hint=f"ask for at least --tokens {length}, or for shorter rows with --length",
        )


@dataclass(frozen=True)
class Job(RunSettings):
    """A calibration as the user asked for it."""

    model: str
    recipe: Recipe
    output: Path
    batch: int = 4
    """Rows per forward pass; `SIZED` leaves them to the plan."""
    restart: bool = False
    fit_length: bool = False
    """Whether rows longer than the model's positions are shortened instead of refused. True if the
    length is the recipe's default and not the user's choice."""

    def __post_init__(self) -> None:
        folders.check_name(self.output)

    @property
    def checkpoint(self) -> Path:
        """The main file of the checkpoint, next to the output."""
        return self.output.with_name(self.output.name + ".checkpoint.safetensors")

    @property
    def lock(self) -> Path:
        """The lock file that keeps other jobs away from the checkpoint and the output."""
        return self.checkpoint.with_name(f".{self.checkpoint.name}.lock")

    @property
    def unfinished(self) -> bool:
        """Whether an earlier run for this output was stopped and can be resumed."""
        saved = (*checkpoint_files(self.checkpoint), *rank_files(self.checkpoint))
        return any(files.size_of(path) is not None for path in saved)


@dataclass(frozen=True)
class Plan:
    """A job as it is known before any weights are read.

    `job` is the job to run, with rows that fit the model. `config` and `geometry` are None if the
    model is refused; `geometry` is also None if only the weights can tell. Sizes are estimates in
    bytes.
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
    _ = job.memory_limits  # only for the errors that it raises
    source = find(job.model, job.revision)
    try:
        config = loading.load_config(source, job.recipe.rope_scaling)
        if job.recipe.needs_statistics:
            check_loadable(config, source.name, job.torch_device)
        model = loading.on_meta(config, source.name)
        with as_unavailable(f"{source.name} fails when it runs"):
            geometry = geometry_on_meta(model)
    except UnsupportedModel as refusal:
        return Plan(job, source, None, None, refusal)
    if job.recipe.equalize:
        geometry, problem = _trace_equalizing(model, geometry)
        if problem is not None:
            reason = f"equalizers cannot be folded into these weights: {problem}"
            refused = UnsupportedModel(reason, hint="leave --equalize out")
            return Plan(job, source, config, geometry, refused)
    recipe = shorten_rows(job.recipe, config) if job.fit_length else job.recipe
    recipe, notes = settle_centering(recipe, shifted_layers(geometry or []))
    check_recipe(recipe, geometry or [])
    check_length(recipe, config)
    job = replace(job, recipe=recipe)
    known = Plan(job, source, config, geometry, None, notes=tuple(notes))
    return _with_sizes(known, model)


def _trace_equalizing(
    model: PreTrainedModel, geometry: Geometry | None
) -> tuple[Geometry | None, str | None]:
    """The geometry of a model on `meta` with what equalizers need to know, and None; or the
    geometry as it is, and why the weights could not carry equalizers."""
    if geometry is None:
        return None, "the model does not run without weights, so it cannot be traced"
    try:
        return with_equalizing(model, geometry), None
    except UnsupportedModel as refusal:
        return geometry, str(refusal)


def _with_sizes(known: Plan, model: PreTrainedModel) -> Plan:
    """The plan with its size estimates; `model` is on `meta`."""
    job = known.job
    assert known.config is not None
    stored = weights_bytes(known.source, model)
    dtype = job.torch_dtype
    quantized = quantization_of(known.config) is not None
    loaded = stored
    if quantized or not isinstance(dtype, torch.dtype):
        # Weights load in their stored dtype; activations use the config's.
        text_config = known.config.get_text_config(decoder=True)
        dtype = getattr(text_config, "dtype", None) or torch.bfloat16
        plain = is_dequantized(known.config)
    else:
        plain = True
    if plain:
        loaded = dtype.itemsize * model.num_parameters()
    on_cpu = job.torch_device == "cpu"
    memory = total_memory(on_cpu, spread=job.device_map is not None)
    needs = Footprint(
        recipe=job.recipe,
        geometry=known.geometry or [],
        config=model.config,
        batch=job.batch,
        item=dtype.itemsize,
        on_cpu=on_cpu,
    )
    if job.batch == SIZED:
        limits = job.memory_limits
        earlier = None if job.restart else earlier_batch(job.checkpoint, job.output)
        job = replace(job, batch=earlier or choose_batch(needs, loaded, limits))
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
