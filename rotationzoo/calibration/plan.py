"""A calibration job, and its plan from the config: refusals, adapted recipes, memory and disk."""

import os
import platform
import re
import resource
import sys
from bisect import bisect_right
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PretrainedConfig, PreTrainedModel

from rotationzoo.artifact.layout import matrix_count, statistic_dims
from rotationzoo.artifact.store import MANIFEST
from rotationzoo.calibration.soundness import check_recipe
from rotationzoo.codec.engine_needs import DEFAULT
from rotationzoo.errors import RotationZooError, UnsupportedModel
from rotationzoo.geometry import Geometry, Layer, cached_layers, shift_reason, shifted_layers
from rotationzoo.linalg.moments import run_bytes
from rotationzoo.model import loading, placement
from rotationzoo.model.files import check_engine, is_gguf
from rotationzoo.model.geometry import geometry_on_meta
from rotationzoo.model.long_masks import BLOCK_QUERIES, LARGEST_MASK
from rotationzoo.model.quantized import check_loadable, is_dequantized, quantization_of
from rotationzoo.model.source import Source, find
from rotationzoo.recipe import Recipe
from rotationzoo.recipe.rope import check_positions, position_count
from rotationzoo.settings import RunSettings
from rotationzoo.storage import files, folders, strict_json
from rotationzoo.text.rows import media_tokens
from rotationzoo.words import counted

_STATED = {"batch": "[1-9][0-9]{0,6}", "date": "[0-9]{4}(-[0-9]{2}){2}"}


@dataclass(frozen=True)
class Job(RunSettings):
    """A calibration as the user asked for it."""

    model: str
    recipe: Recipe
    output: Path
    batch: int = 4  # rows per forward pass; `SIZED` leaves them to the plan
    engine: str = DEFAULT  # the engine that the rotations are for
    restart: bool = False
    fit_length: bool = False
    """Whether rows that are too long are shortened, not refused: if the length is the default."""

    def __post_init__(self) -> None:
        folders.check_name(self.output)

    @property
    def checkpoint(self) -> Path:
        return self.output.with_name(self.output.name + ".checkpoint.safetensors")

    def earlier(self, key: str) -> str | None:
        """The `batch` or `date` of an existing checkpoint or artifact, which this run must keep."""
        identities: list[Any] = [files.read_json(self.output / MANIFEST).get("identity")]
        # Errors of a damaged checkpoint are raised when it is read.
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
        """Whether an earlier run for this output can be resumed."""
        return files.size_of(self.checkpoint) is not None


@dataclass(frozen=True)
class Plan:
    """A job before any weights are read, with rows that fit the model. `config` and `geometry` are
    None for a refused model, and `geometry` also if only the weights show it."""

    job: Job
    source: Source
    config: PretrainedConfig | None
    geometry: Geometry | None
    refusal: UnsupportedModel | None
    weights_bytes: int = 0
    artifact_bytes: int = 0
    pass_bytes: int = 0  # memory of a forward pass without the weights, but with the sums
    peak_memory_bytes: int = 0
    memory_bytes: int = 0  # memory of the device where the job would run
    notes: tuple[str, ...] = ()  # how the job differs from the request, and why

    @property
    def needs_weights(self) -> bool:
        """Whether the config is not enough for the job."""
        return self.job.recipe.needs_statistics or self.geometry is None


def plan(job: Job) -> Plan:
    """Inspect the model on `meta` and check the job against it. The plan has a `refusal` if the
    model cannot be calibrated. Raises `RotationZooError` if the job is not possible."""
    placement.memory_limits(job.device_map, job.max_memory)
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
    """The recipe, without `center_keys` if attention in some layers needs the mean; and notes."""
    layers = shifted_layers(geometry)
    if not recipe.center_keys or not layers:
        return recipe, []
    note = f"keys keep their mean, although the recipe {recipe.name} centers them"
    return recipe.model_copy(update={"center_keys": False}), [f"{note}: {shift_reason(layers)}"]


USUAL_LENGTH = 2048  # tokens of a row if there are too few tokens for the preset's rows


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
    stored, dtype = placement.weights_bytes(known.source, model), job.torch_dtype
    quantized = quantization_of(known.config) is not None
    loads_stored = quantized or not isinstance(dtype, torch.dtype)
    if loads_stored:  # activations use the config's dtype
        text_config = known.config.get_text_config(decoder=True)
        dtype = getattr(text_config, "dtype", None) or torch.bfloat16
    assert isinstance(dtype, torch.dtype)
    loaded = stored
    if not loads_stored or is_dequantized(known.config) or is_gguf(known.source.folder):
        loaded = dtype.itemsize * model.num_parameters()
    on_cpu, geometry = job.torch_device == "cpu", known.geometry or []
    needs = Footprint(job.recipe, geometry, model.config, dtype.itemsize, on_cpu)
    if job.batch == SIZED:
        limits = placement.memory_limits(job.device_map, job.max_memory)
        batch = job.earlier("batch") or choose_batch(needs, loaded, limits)
        job = replace(job, batch=int(batch))
    return replace(
        known,
        job=job,
        pass_bytes=needs.pass_bytes(job.batch),
        weights_bytes=stored,
        artifact_bytes=needs.rotations + needs.statistics,
        peak_memory_bytes=needs.peak(loaded, job.batch),
        memory_bytes=total_memory(on_cpu, spread=job.device_map is not None),
    )


# ---- memory and disk


_STATUS = Path("/proc/self/status")


def total_memory(on_cpu: bool, spread: bool) -> int:
    """Bytes of main memory, of the GPU, or of both for `spread` weights."""
    main = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    main = min([main, *(limit for limit, _ in placement.container_limits())])
    if not torch.cuda.is_available() or (on_cpu and not spread):
        return main
    devices = range(torch.cuda.device_count())
    sizes = [torch.cuda.get_device_properties(device).total_memory for device in devices]
    return main + sum(sizes) if spread else sizes[torch.cuda.current_device()]


def peak_memory() -> int:
    """The process's peak memory in bytes: on all CUDA devices if it used them, else resident."""
    if torch.cuda.is_available():
        devices = range(torch.cuda.device_count())
        on_devices = sum(torch.cuda.max_memory_allocated(device) for device in devices)
        if on_devices:
            return on_devices
    if kilobytes := placement.sum_entries(_STATUS, "VmHWM:"):  # Linux only
        return 1024 * kilobytes
    # The peak of the parent process, if that is larger; in bytes on macOS, else in kilobytes.
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident if sys.platform == "darwin" else resident * 1024


def device_name(device: str) -> str:
    """The name that a manifest gives to the device `cuda` or `cpu`."""
    return torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU"


# Memory of torch and transformers themselves: 420 to 460 MB measured.
_LIBRARIES = 450_000_000


@dataclass(frozen=True)
class Footprint:
    """Estimated sizes of one job, in bytes. Terms that are added exist at the same time."""

    recipe: Recipe
    geometry: Geometry
    config: PretrainedConfig
    item: int  # bytes per activation element
    on_cpu: bool

    @property
    def statistics(self) -> int:
        """The statistics: float64 second moments."""
        if not self.recipe.needs_statistics:
            return 0
        total = 0
        for layer in cached_layers(self.geometry):
            squares = sum(dim**2 for dim in statistic_dims(layer, self.recipe).values())
            if self.recipe.transform:  # the Fisher information
                squares += _squares(layer)
            total += 8 * layer.kv_heads * squares
        return total

    @property
    def rotations(self) -> int:
        """The rotations: float32 matrices, and with transform coding one more per head."""
        total = 0
        for layer in cached_layers(self.geometry):
            matrices = matrix_count(self.recipe, layer.kv_heads)
            matrices += layer.kv_heads * self.recipe.transform
            total += 4 * matrices * _squares(layer)
        return total

    def peak(self, weights: int, batch: int) -> int:
        """Peak memory of the job, including `weights` bytes for the model."""
        libraries = _LIBRARIES if self.on_cpu else 0
        if not self.recipe.needs_statistics:
            return self.rotations + libraries
        passing = weights + self.pass_bytes(batch)
        # On a CPU, the allocator keeps what the passes freed.
        if self.on_cpu:
            return libraries + passing + self.rotations
        # After the passes, the sums exist together with the averages that are written.
        return max(passing, weights + 2 * self.statistics + self.rotations)

    def pass_bytes(self, batch: int) -> int:
        """Bytes of a pass over `batch` rows without weights: activations and both sets of sums."""
        return self.activations(batch) + 2 * self.statistics

    def activations(self, batch: int) -> int:
        """Peak memory of the decoder for a batch: residuals, projections, sums and eager scores."""
        length, tokens = self.recipe.data.length, self.recipe.data.length * batch
        scores, text = 0, self.config.get_text_config(decoder=True)
        if text._attn_implementation == "eager":
            heads = max((layer.query_heads for layer in self.geometry), default=0)
            whole = length * length <= LARGEST_MASK
            scores = 3 * 4 * tokens * (length if whole else BLOCK_QUERIES) * heads
        hidden: int = text.hidden_size
        inner = getattr(text, "intermediate_size", None) or 4 * hidden
        if not isinstance(inner, int):  # some models have one size per layer
            inner = max(inner)
        states: int = tokens * self.item * (4 * hidden + 3 * max(self._widest, inner))
        return states + self._adding(batch) + scores

    def _adding(self, batch: int) -> int:
        """Peak memory of adding one layer's rows to the sums: float64 copies of one row of text, or
        on a GPU runs of a whole batch in 16 bits."""
        length = self.recipe.data.length
        if self.on_cpu or self.item > 2:
            return 2 * 8 * length * self._widest
        adding = [0]
        for layer in self.geometry:
            rows = length * batch
            for dim in (layer.key_dim, layer.value_dim):
                adding.append(run_bytes(layer.kv_heads, layer.group * rows, dim))
            if self.recipe.value_statistic == "key_energy":
                # Keys or values of one row in float64, and two products of them.
                adding.append(3 * 8 * length * layer.kv_heads * max(layer.key_dim, layer.value_dim))
        return max(adding)

    @property
    def _widest(self) -> int:
        """The largest width of a layer's queries and outputs together."""
        widths = (layer.query_heads * (layer.key_dim + layer.value_dim) for layer in self.geometry)
        return max(widths, default=0)


def _squares(layer: Layer) -> int:
    """Elements of one `[D, D]` matrix of each side."""
    return sum(layer.dims[side] ** 2 for side in layer.sides)


SIZED = 0  # the batch of a job that leaves the number of rows to `choose_batch`


def choose_batch(needs: Footprint, weights: int, limits: placement.Limits | None) -> int:
    """The rows of a pass: all rows if their activations fit, else even parts, as few as fit. Of all
    `weights`, a device holds up to its limit or, without one, all but half of its free memory."""
    rooms = []
    for device in placement.devices_of(on_cpu=needs.on_cpu):
        usable = int(placement.USABLE * placement.free_memory(device))
        if limits is None:
            rooms.append(max(usable - weights, usable // 2))
        else:
            rooms.append(usable - min(weights, limits.get(device, 0)))
    # Documents with media may be shorter: this assumes the longest.
    rows = max(1, needs.recipe.data.tokens // needs.recipe.data.length)
    fitting = bisect_right(range(1, rows + 1), min(rooms), key=needs.pass_bytes)
    passes = -(-rows // max(fitting, 1))
    return -(-rows // passes)
