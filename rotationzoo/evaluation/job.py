"""What a rotation costs a model whose cache is stored in 2 bits: attention KL, output error and
perplexity, arm by arm."""

import random
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from rotationzoo.artifact.store import Artifact
from rotationzoo.cache.arm import Arm
from rotationzoo.cache.simulated import Simulation
from rotationzoo.cache.size import bits_per_element
from rotationzoo.cache.windows import Cache
from rotationzoo.codec import int2
from rotationzoo.errors import RotationZooError, UsageError
from rotationzoo.evaluation.arms import BASELINES, arms_of, shared_recipe
from rotationzoo.evaluation.metrics import Metrics, buckets_of
from rotationzoo.evaluation.saved import save
from rotationzoo.evaluation.verdict import judge
from rotationzoo.model import centering, loading
from rotationzoo.model.capture import Attention, intercept
from rotationzoo.model.geometry import (
    Geometry,
    geometry_of,
    geometry_on_meta,
    same_shapes,
    shifted_layers,
)
from rotationzoo.model.placement import memory_limits, place_weights
from rotationzoo.model.source import Source, config_hash, fetch, find, weights_fingerprint
from rotationzoo.progress import Progress, silent
from rotationzoo.recipe import Data
from rotationzoo.text.documents import HELD_OUT
from rotationzoo.text.rows import Corpus, read_corpus

_PROBE_TOKENS = 8


@dataclass(frozen=True)
class Evaluation:
    """One evaluation as the user asked for it. `windows` are pairs of sink and recent tokens; empty
    takes the recipe's."""

    model: str
    artifacts: list[Path]
    data: Data
    windows: list[tuple[int, int]] = field(default_factory=list)
    format: str = "sglang"
    layers: set[int] | None = None
    sides: tuple[str, ...] = ("key", "value")
    prefill_chunk: int | None = None
    prefill_layout: Literal["server", "window"] | None = None
    """What is exact between chunks, as in `simulate.Cache`; None is the server's."""
    queries: int = 32
    """Sampled queries a row for the attention KL; 0 leaves it out."""
    revision: str | None = None
    batch: int = 1
    device: str = "auto"
    dtype: str = "auto"
    device_map: str | None = None
    max_memory: str | None = None
    save_to: list[Path] = field(default_factory=list)
    """Those of the artifacts that the report is added to."""


def evaluate(job: Evaluation, progress: Progress = silent) -> dict[str, Any]:
    """The report, as `evaluate --json` prints it. Raises `RotationZooError` for what does not fit
    together, before any weight is fetched wherever the config can tell."""
    if job.format not in int2.SIMULATED:
        raise UsageError(
            f"there is no format {job.format!r}", hint=f"give one of {', '.join(int2.SIMULATED)}"
        )
    if job.prefill_layout and job.prefill_chunk is None:
        raise UsageError(
            "--prefill-layout is for a prefill in chunks", hint="add: --prefill-chunk 2048"
        )
    memory_limits(job.device_map, job.max_memory)
    artifacts = [Artifact.open(folder) for folder in job.artifacts]
    for artifact in artifacts:
        if artifact.folder in job.save_to:
            artifact.check_writable()
    progress("looking at the model", 0, 0)
    source = find(job.model, job.revision)
    config = loading.load_config(source)
    geometry = geometry_on_meta(loading.on_meta(config, source.name))
    if geometry is not None:
        _check(job, geometry, artifacts)
    caches = _caches(job, artifacts)
    start = max(cache.first_quantized for cache in caches)  # the same tokens count for every window
    if job.data.length < start + 2:
        raise RotationZooError(
            f"texts of {job.data.length} tokens are too short: the first that reads a quantized one is at position {start}",
            hint="give longer rows with --length, or smaller ones with --windows",
        )
    if job.data.packing != "document" and not job.data.row_lengths:
        raise UsageError(
            f"{job.data.tokens} tokens are less than one text of {job.data.length}",
            hint="more --tokens, or a shorter --length",
        )
    fetch(source, weights=False)
    held_out = {"source": str(HELD_OUT)} if job.data.source == "bundled" else {}
    text = read_corpus(job.data.model_copy(update=held_out), loading.load_tokenizer(source))
    progress("fetching the weights", 0, 0)
    fetch(source)
    with place_weights(job.device_map, job.max_memory) as placement:
        progress("loading the model", 0, 0)
        dtype = loading.torch_dtype(job.dtype, job.device, job.device_map)
        model = loading.load(source, config, loading.torch_device(job.device), dtype, placement)
        if geometry is None:
            geometry = geometry_of(model)
            _check(job, geometry, artifacts)
        arms = arms_of(artifacts, geometry)
        with loading.forward_errors(job.model, job.batch, job.data.length):
            exact, tallies = _run(
                job, model, geometry, text.batches(job.batch), caches, arms, start, progress
            )
    windows: list[dict[str, Any]] = []
    for cache in caches:
        found = {arm.name: tallies[cache, arm.name].report(exact) for arm in arms}
        for arm in arms:
            bits = bits_per_element(
                geometry, arm.group_size, cache.format, cache.sink, cache.recent
            )
            found[arm.name]["bits_per_element"] = bits
        windows.append({"sink": cache.sink, "recent": cache.recent, "arms": found})
    measured = exact.exact_report()
    for window in windows:
        names = [arm.name for arm in arms[: len(artifacts)]]
        window["verdict"] = judge(window["arms"], names, measured["text_tokens"])
    report = {
        "model": source.label,
        "revision": source.revision,
        "weights_fingerprint": weights_fingerprint(source),
        "text": {
            "source": job.data.label,
            "fingerprint": text.fingerprint,
            "rows": len(text.rows),
            "length": job.data.length,
        },
        "tokens": exact.tokens,
        "first_position": start,
        "format": job.format,
        "sides": list(job.sides),
        "layers": sorted(_layers(job, geometry)),
        "prefill_chunk": job.prefill_chunk,
        "prefill_layout": caches[0].prefill_layout if job.prefill_chunk else None,
        "notes": _notes(text, source, artifacts, geometry),
        "exact": measured,
        "arms": windows[0]["arms"],
        "verdict": windows[0]["verdict"],
        "windows": windows,
    }
    for artifact, arm in zip(artifacts, arms, strict=False):
        if artifact.folder in job.save_to:
            save(report, artifact, arm.name, BASELINES)
    return report


@torch.no_grad()
def _run(
    job: Evaluation,
    model: PreTrainedModel,
    geometry: Geometry,
    batches: list[torch.Tensor],
    caches: list[Cache],
    arms: list[Arm],
    start: int,
    progress: Progress,
) -> tuple[Metrics, dict[tuple[Cache, str], Metrics]]:
    """Every row through the exact model, and through each arm read through each cache."""
    batches = [ids for ids in batches if ids.shape[1] > start + 1]
    if not batches:
        raise RotationZooError(
            f"no row is longer than {start + 1} tokens",
            hint="give longer documents, or smaller --windows",
        )
    layers = sorted(_layers(job, geometry))
    longest = max(ids.shape[1] for ids in batches)
    edges = buckets_of(start, longest)
    exact = Metrics(edges, layers, start)
    tallies = {
        (cache, arm.name): Metrics(edges, layers, start) for cache, arm in product(caches, arms)
    }
    modules = attention_modules(
        model, batches[0][:1, :_PROBE_TOKENS].to(loading.input_device(model))
    )
    done, total = 0, len(batches) * (1 + len(tallies))
    for number, batch in enumerate(batches):
        ids = batch.to(loading.input_device(model))
        exact.add_losses(losses(model, ids, start))
        progress("evaluating", done := done + 1, total)
        queries = _sample(start, ids.shape[1], job.queries, number)
        for cache, arm in product(caches, arms):
            tally = tallies[cache, arm.name]
            simulation = Simulation(arm, cache, geometry, set(layers), job.sides, queries)
            with simulation.running(model, modules, tally.see_output, tally.see_kl):
                tally.add_losses(losses(model, ids, start))
            progress("evaluating", done := done + 1, total)
    return exact, tallies


def attention_modules(model: PreTrainedModel, ids: torch.Tensor) -> dict[int, torch.nn.Module]:
    """The module of each layer that calls attention, found on a few tokens `[B, T]`."""
    modules: dict[int, torch.nn.Module] = {}

    def note(
        layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attend: Attention
    ) -> torch.Tensor:
        modules[layer] = attend.module
        return attend(query, key, value)

    with intercept(model, note):
        model(input_ids=ids, use_cache=False)
    return modules


def losses(model: PreTrainedModel, ids: torch.Tensor, start: int) -> torch.Tensor:
    """Negative log likelihood `[B, P]` of the token after each position from `start` on,
    float32."""
    kept = ids.shape[1] - start
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=kept).logits[:, -kept:-1]
    rows = [
        torch.nn.functional.cross_entropy(row.float(), target.to(row.device), reduction="none")
        for row, target in zip(
            logits, ids[:, start + 1 :], strict=True
        )  # a row at a time bounds the float32 copy
    ]
    return torch.stack(rows)


def _sample(start: int, length: int, count: int, seed: int) -> torch.Tensor | None:
    """Positions of queries past the windows, the same for every arm."""
    if not count:
        return None
    positions = range(start, length)
    return torch.tensor(sorted(random.Random(seed).sample(positions, min(count, len(positions)))))


def _layers(job: Evaluation, geometry: Geometry) -> set[int]:
    """What reads the caches that are stored in 2 bits: the layers that own them, and those that
    share them."""
    return {layer.index for layer in geometry if job.layers is None or layer.owner in job.layers}


def _check(job: Evaluation, geometry: Geometry, artifacts: list[Artifact]) -> None:
    known = {layer.index for layer in geometry}
    if job.layers is not None and (unknown := job.layers - known):
        raise UsageError(
            f"{job.model} has no attention in layer {min(unknown)}: it has layers {_ranges(known)}"
        )
    owners = {layer.index: layer.owner for layer in geometry}
    if shared := sorted(layer for layer in job.layers or () if owners[layer] != layer):
        raise UsageError(
            f"layer {shared[0]} of {job.model} stores nothing: it reads the cache of layer {owners[shared[0]]}",
            hint=f"name that layer: --layers {owners[shared[0]]}",
        )
    for artifact in artifacts:
        if not artifact.bound:
            raise RotationZooError(
                f"{artifact.folder} is bound to no model",
                hint=f"import its files again with --model {job.model}",
            )
        if not same_shapes(artifact.geometry, geometry):
            raise RotationZooError(
                f"{artifact.folder} was made for a model of other layers, heads or dimensions than {job.model}: "
                f"{artifact.manifest.model.id}",
                hint=f"make one with: rotationzoo calibrate {job.model}",
            )


def _caches(job: Evaluation, artifacts: list[Artifact]) -> list[Cache]:
    recipe = shared_recipe(artifacts)
    windows = job.windows or [(recipe.sink, recipe.recent)]
    form = int2.SIMULATED[job.format]
    layout = job.prefill_layout or "server"
    return [Cache(form, sink, recent, job.prefill_chunk, layout) for sink, recent in windows]


def _notes(
    text: Corpus, source: Source, artifacts: list[Artifact], geometry: Geometry
) -> list[str]:
    """What the reader of the numbers should know."""
    notes = [text.note] if text.note else []
    for artifact in artifacts:
        made_for = artifact.manifest.model
        if made_for.config_sha256 != config_hash(source) or (
            made_for.weights_fingerprint
            and made_for.weights_fingerprint != weights_fingerprint(source)
        ):
            notes.append(
                f"{artifact.folder.resolve().name} was made for other weights than these: {made_for.id}"
            )
        calibration = artifact.manifest.calibration
        if calibration is not None and calibration.fingerprint == text.fingerprint:
            notes.append(f"{artifact.folder.resolve().name} was calibrated on this very text")
        if artifact.recipe.center_keys and (moved := shifted_layers(geometry)):
            name = artifact.folder.resolve().name
            notes.append(
                f"{name} centres keys, which this model does not bear: {centering.reason(moved)}"
            )
    return notes


def _ranges(layers: set[int]) -> str:
    return (
        f"{min(layers)} to {max(layers)}"
        if layers == set(range(min(layers), max(layers) + 1))
        else str(sorted(layers))
    )
