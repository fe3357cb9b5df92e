"""One calibration from a model's name to an artifact on disk: resumable, and silent but for a progress callback.

`plan` says what it will do from the model's config alone; `calibrate` does it.
"""

import os
import platform
import resource
import shutil
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PretrainedConfig

from rotationzoo import artifact, card, corpus, models
from rotationzoo.artifact import Artifact
from rotationzoo.checkpoint import Checkpoint
from rotationzoo.collect import Progress, collect, silent
from rotationzoo.corpus import Corpus
from rotationzoo.errors import ModelUnavailable, RotationZooError, UnsupportedModel, UsageError
from rotationzoo.fit import check_recipe, fit
from rotationzoo.models import Geometry, Source, cached_layers
from rotationzoo.moments import Statistics, to_tensors
from rotationzoo.recipe import Recipe
from rotationzoo.rotation import orthogonality_error

_CHECKED_TOKENS = 32  # of the first row, for the comparison of logits with and without capture


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
    source = models.find(job.model, job.revision)
    config = models.load_config(source)
    model = models.on_meta(config, source.name)
    geometry, refusal = None, None
    try:
        geometry = models.geometry_on_meta(model)
    except UnsupportedModel as error:
        refusal = error
    if geometry is not None:
        check_recipe(job.recipe, geometry)
    if job.recipe.needs_statistics:
        _check_length(job.recipe, config)
    weights = models.weights_bytes(source, model)
    statistics = _statistics_bytes(geometry or [])
    peak = weights + 2 * statistics + _activation_bytes(job, config, geometry or [])
    return Plan(source, config, geometry, refusal, weights, statistics + _rotation_bytes(geometry or []), peak)


def calibrate(job: Job, progress: Progress = silent) -> Artifact:
    """Run a job to its artifact, going on from a checkpoint of the same job where there is one.

    An artifact of the same job that is there already is returned as it is. Raises `RotationZooError` with one sentence for
    everything that a user can mend, and before the passes wherever it can be known before.
    """
    started = time.monotonic()
    progress("looking at the model", 0, 0)
    known = plan(job)
    if known.refusal is not None:
        raise known.refusal
    source, recipe = known.source, job.recipe
    _check_output(job)
    models.fetch(source, weights=False)
    text = _read(source, recipe) if recipe.needs_statistics else None
    _check_room(job, known)
    progress("fetching the weights", 0, 0)
    models.fetch(source)
    identity = _identity(job, source, text)
    if (finished := _finished(job, identity)) is not None:
        return finished

    geometry, statistics = known.geometry, None
    checkpoint = Checkpoint(job.checkpoint, identity)
    if job.restart:
        checkpoint.remove()
    if text is not None or geometry is None:
        geometry, statistics = _run_model(job, known, text, checkpoint, progress)
    progress("composing rotations", 0, 0)
    rotations = fit(statistics, recipe, geometry)
    manifest = {
        "model": {
            "id": source.name,
            "revision": source.revision,
            "architecture": (known.config.architectures or [type(known.config).__name__])[0],
            "config_sha256": models.config_hash(source),
            "weights_fingerprint": identity["weights"],
        },
        "geometry": models.geometry_json(geometry),
        "recipe": recipe.model_dump(),
        "recipe_sha256": recipe.hash,
        "calibration": _describe(text, recipe),
        "identity": identity,
        "versions": {name: version(name) for name in ("rotationzoo", "torch", "transformers")}
        | {"python": platform.python_version()},
        "run": {
            "device": _device_name(job),
            "dtype": str(job.torch_dtype).removeprefix("torch."),
            "batch": job.batch,
            "seconds": round(time.monotonic() - started, 3),
            "peak_memory_bytes": peak_memory_bytes(),
        },
        "metrics": {"orthogonality_error": max_error(rotations)},
    }
    sums = to_tensors(statistics) if statistics is not None else None
    written = artifact.write(job.output, rotations, sums, manifest, card.render(manifest))
    checkpoint.remove()
    return written


def max_error(rotations: dict[str, torch.Tensor]) -> float:
    """The largest orthogonality error of the stored float32 rotations."""
    return max(orthogonality_error(tensor) for name, tensor in rotations.items() if name.endswith(".rotation"))


def peak_memory_bytes() -> int:
    """The most memory this process has held: of all CUDA devices where they were used, else resident in main memory."""
    if torch.cuda.is_available():
        on_device = sum(torch.cuda.max_memory_allocated(device) for device in range(torch.cuda.device_count()))
        if on_device:
            return on_device
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident if sys.platform == "darwin" else resident * 1024


def _run_model(
    job: Job, known: Plan, text: Corpus | None, checkpoint: Checkpoint, progress: Progress
) -> tuple[Geometry, Statistics | None]:
    """Load the model, look at it where `meta` could not, check the capture and collect the statistics."""
    geometry = known.geometry
    with models.placement(job.device_map, job.max_memory) as placement:
        progress("loading the model", 0, 0)
        model = models.load(known.source, known.config, job.torch_device, job.torch_dtype, placement)
        row = text.rows[0] if text is not None else torch.zeros(_CHECKED_TOKENS, dtype=torch.long)
        ids = row[None, :_CHECKED_TOKENS].to(model.device)
        if geometry is None:
            geometry = models.geometry_of(model, ids)
            check_recipe(job.recipe, geometry)
        if text is None:
            return geometry, None
        progress("checking the capture", 0, 0)
        models.check(model, ids)
        return geometry, collect(model, geometry, text.batches(job.batch), job.recipe, checkpoint, progress)


def _read(source: Source, recipe: Recipe) -> Corpus:
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.folder)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelUnavailable(
            f"{source.name} has no readable tokenizer", hint="save the model's tokenizer into the same folder"
        ) from error
    return corpus.read(recipe.data, tokenizer)


def _identity(job: Job, source: Source, text: Corpus | None) -> dict[str, str]:
    """Everything that decides the bytes of the result: what a checkpoint or a finished artifact must agree with."""
    return {
        "recipe": job.recipe.hash,
        "weights": models.weights_fingerprint(source),
        "text": text.fingerprint if text else "",
        "batch": str(job.batch),
        "device": job.torch_device + (f", device map {job.device_map}" if job.device_map else ""),
        "dtype": str(job.torch_dtype),
        "versions": f"torch {torch.__version__}, transformers {version('transformers')}",
    }


def _check_length(recipe: Recipe, config: PretrainedConfig) -> None:
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


def _check_output(job: Job) -> None:
    """The output can be written, and what is there may be replaced."""
    if job.output.exists() and not job.restart:
        if not (job.output / artifact.MANIFEST).is_file() and (not job.output.is_dir() or any(job.output.iterdir())):
            raise RotationZooError(f"{job.output} exists and is no artifact", hint="choose another place with --output")
        if (job.output / artifact.MANIFEST).is_file():
            theirs = Artifact.open(job.output).manifest
            if theirs["recipe_sha256"] != job.recipe.hash:
                raise RotationZooError(
                    f"{job.output} holds the work of another recipe ({theirs['recipe']['name']} for {theirs['model']['id']})",
                    hint="choose another place with --output, or replace it with --restart",
                )
    ancestor = next(folder for folder in job.output.absolute().parents if folder.exists())
    with artifact.disk_errors(job.output), artifact.temporary_sibling(ancestor / job.output.name):
        pass


def _check_room(job: Job, known: Plan) -> None:
    ancestor = next(folder for folder in job.output.absolute().parents if folder.exists())
    free, needed = shutil.disk_usage(ancestor).free, 2 * known.artifact_bytes  # the artifact, and a checkpoint beside it
    if free < needed:
        raise RotationZooError(
            f"the disk of {job.output} has {free / 1e6:,.0f} MB free and {needed / 1e6:,.0f} MB are needed",
            hint="make room, or choose another place with --output",
        )


def _finished(job: Job, identity: dict[str, str]) -> Artifact | None:
    """The artifact of this very job, if it is there and whole."""
    if job.restart or not (job.output / artifact.MANIFEST).is_file():
        return None
    there = Artifact.open(job.output)
    if changed := [key for key, value in identity.items() if there.manifest["identity"].get(key) != value]:
        raise RotationZooError(
            f"{job.output} holds the work of another job: {', '.join(changed)} differ",
            hint="choose another place with --output, or replace it with --restart",
        )
    return None if there.damaged_files() else there


def _describe(text: Corpus | None, recipe: Recipe) -> dict[str, Any] | None:
    if text is None:
        return None
    described = recipe.data.model_dump(include={"source", "subset", "split", "column", "packing", "length", "seed"})
    return described | {
        "tokens": text.tokens, "rows": len(text.rows), "fingerprint": text.fingerprint, "note": text.note
    }  # fmt: skip


def _device_name(job: Job) -> str:
    if job.torch_device == "cuda":
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, {os.cpu_count()} threads"


# ---- sizes


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
    libraries = 600_000_000
    return 4 * tokens * hidden * item + projections + 2 * 8 * length * widest + libraries
