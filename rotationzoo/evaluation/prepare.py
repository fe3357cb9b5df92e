"""The settings of an evaluation, and all that is settled and checked before weights are fetched."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from rotationzoo.artifact.reductions import check_pooled
from rotationzoo.artifact.scores import FLOOR
from rotationzoo.artifact.store import Artifact
from rotationzoo.budget import EQUAL, Budget, EvenBudget
from rotationzoo.codec import int2
from rotationzoo.codec.formats import BUDGETED
from rotationzoo.codec.options import check_budget
from rotationzoo.codec.settings import budget_beside_others
from rotationzoo.codec.windows import CacheLayout
from rotationzoo.errors import RotationZooError, UsageError
from rotationzoo.evaluation.arms import BASELINES, RIVALS, shared_recipe
from rotationzoo.evaluation.forward import Tell
from rotationzoo.evaluation.tasks.prompts import TaskPlan, TaskSettings, plan_tasks
from rotationzoo.geometry import (
    Geometry,
    full_attention_layers,
    shares_blocks,
    shift_reason,
    shifted_layers,
)
from rotationzoo.model import loading
from rotationzoo.model.compatibility import check_artifacts, other_weights_note, settle_rope_scaling
from rotationzoo.model.geometry import geometry_on_meta
from rotationzoo.model.placement import memory_limits
from rotationzoo.model.quantized import check_loadable
from rotationzoo.model.source import Source, fetch, find
from rotationzoo.progress import Progress
from rotationzoo.recipe import Data
from rotationzoo.recipe.rope import check_positions, position_count
from rotationzoo.settings import RunSettings
from rotationzoo.simulation.rivals import check_engine_cache
from rotationzoo.text.documents import HELD_OUT
from rotationzoo.text.rows import Corpus, read_corpus, shortfall
from rotationzoo.words import counted, nearest
from rotationzoo.writer import check_writable


@dataclass(frozen=True)
class Evaluation(RunSettings):
    """The settings of one evaluation. `api.evaluate` explains those that it has too."""

    model: str
    artifacts: list[Path]
    data: Data
    tasks: TaskSettings = field(default_factory=TaskSettings)
    windows: list[tuple[int, int]] = field(default_factory=list)
    format: str | None = None  # None means `sglang`, or `segments` for a budget of bits
    budget: Budget | None = None
    rungs: tuple[Budget, ...] = ()
    """Budgets of the one artifact, fewest bits first. The report is on the fewest bits that keep
    the share `keep`, and is added to the artifact that they make."""
    anyway: bool = False
    layers: set[int] | None = None  # to store in 2 bits; None means all
    prefill_chunk: int | None = None
    prefill_layout: Literal["server", "window"] | None = None
    rope_scaling: str | None = None  # None means as the artifacts were calibrated
    baselines: tuple[str, ...] = BASELINES  # names in `BASELINES` and `RIVALS`
    pooled: bool = False
    uncentered: tuple[str, ...] = ()  # sides whose mean artifacts' arms do not subtract
    engine: str | None = None
    leaves_windows: bool = False
    """Whether layers with a sliding window stay exact, and others share a budget evenly."""
    notes: list[str] = field(default_factory=list)  # on these settings, for the report
    batch: int = 1
    save_to: list[Path] = field(default_factory=list)  # the artifacts that get the report
    record: bool = False  # whether these also get a record of server answers
    fit_length: bool = False
    """Whether the length is a default, so that rows are fitted to the windows and the model's
    positions instead of refused."""
    keep: float = 100 * FLOOR  # percent of the exact model's answers


@dataclass(frozen=True)
class Prepared:
    """All that is known before weights are fetched."""

    job: Evaluation  # with nothing left to the model and the artifacts
    artifacts: list[Artifact]
    source: Source
    scaling: str | None
    config: PretrainedConfig
    caches: list[CacheLayout]
    start: int
    """The first measured position, where tokens read quantized positions with every window."""
    geometry: Geometry | None  # None for a model that does not run on `meta`
    tokenizer: PreTrainedTokenizerBase
    text: Corpus
    plan: TaskPlan

    @property
    def saved(self) -> list[Artifact]:
        """The artifacts that get the report."""
        return [artifact for artifact in self.artifacts if artifact.folder in self.job.save_to]


def prepare(job: Evaluation, progress: Progress, tell: Tell) -> Prepared:
    """Check the settings, the artifacts, the texts and the config against each other. `tell` gets a
    sentence on a text with fewer tokens than requested."""
    _check_settings(job)
    artifacts = [Artifact.open(folder) for folder in job.artifacts]
    for artifact in artifacts:
        if artifact.folder in job.save_to:  # fails now, not after hours of evaluation
            check_writable(artifact)
    if job.pooled:
        check_pooled(artifacts)
    progress("looking at the model", 0, 0)
    source = find(job.model, job.revision)
    scaling = settle_rope_scaling(job.rope_scaling, artifacts, source)
    config = loading.load_config(source, scaling)
    job = _settle_format(_leave_windows(job, artifacts, config), artifacts)
    caches = _build_caches(job, artifacts)
    start = max(cache.first_quantized for cache in caches)
    if job.fit_length:
        job = replace(job, data=_fit_rows(job.data, start, config))
    check_loadable(config, source.name, job.torch_device)
    geometry = geometry_on_meta(loading.on_meta(config, source.name))
    if geometry is not None:
        check_model(job, artifacts, geometry)
    check_positions(config, job.data.length, "texts", "add: --length {}")
    if job.tasks.names and job.tasks.lengths:
        longest, hint = max(job.tasks.lengths), "give --lengths of at most {}"
        check_positions(config, longest, "prompts", hint)
    _check_length(job.data, start)
    check_positions(config, start + 1, "texts", "add: --length {}")
    # The text may be refused and needs only the tokenizer, so it is read before the weights.
    fetch(source, weights=False)
    tokenizer, data = loading.load_tokenizer(source), job.data
    if data.source == "bundled":  # the default for calibration
        data = data.model_copy(update={"source": str(HELD_OUT)})
    progress("reading the text", 0, 0)
    # A chat template that writes the date writes that of the calibration.
    days = filter(None, (each.manifest.identity.get("date") for each in artifacts))
    text = read_corpus(data.model_copy(update={"date": next(days, data.date)}), tokenizer)
    if text.note and shortfall(text.rows, data):
        tell(text.note)
    loading.check_ids(text.rows, config, job.model)
    plan = plan_tasks(job.tasks, data, text, tokenizer, caches)
    return Prepared(
        job, artifacts, source, scaling, config, caches, start, geometry, tokenizer, text, plan
    )


def check_keep(percent: float) -> None:
    """Raise `UsageError` for a share of answers that cannot be required."""
    if not 1 <= percent < 100:
        meant = percent if 0 < percent < 1 else 0.95
        hint = f"write it as: --keep {100 * meant:g}"
        raise UsageError("--keep is percent of the answers, from 1 to below 100", hint)


def _check_settings(job: Evaluation) -> None:
    check_keep(job.keep)
    if job.format not in (None, *int2.SIMULATED):
        formats = ", ".join(int2.SIMULATED)
        raise UsageError(f"there is no format {job.format!r}", f"give one of {formats}")
    known = (*BASELINES, *RIVALS)
    if unknown := [name for name in job.baselines if name not in known]:
        hint = f"give some of {', '.join(RIVALS)}"
        raise UsageError(f"there is no rival {unknown[0]!r}{nearest(unknown[0], known)}", hint)
    if job.tasks.minutes and job.rungs:
        raise UsageError("--fewest-bits cannot be combined with --minutes", "leave out --minutes")
    if job.prefill_layout and job.prefill_chunk is None:
        raise UsageError("--prefill-layout is for a prefill in chunks", "add: --prefill-chunk 2048")
    job.tasks.check()
    memory_limits(job.device_map, job.max_memory)


def check_model(job: Evaluation, artifacts: list[Artifact], geometry: Geometry) -> None:
    """Raise `RotationZooError` if artifacts or rivals do not fit the model."""
    check_artifacts(job.model, artifacts, geometry)
    for name in set(RIVALS).intersection(job.baselines):
        check_engine_cache(name, geometry)


def _leave_windows(
    job: Evaluation, artifacts: list[Artifact], config: PretrainedConfig
) -> Evaluation:
    """The job for an engine that keeps layers with a sliding window exact."""
    full = full_attention_layers(config)
    if not job.leaves_windows or not shares_blocks(config):
        return job
    if job.format == BUDGETED:
        own = next((each.recipe.budget for each in artifacts if each.recipe.budget), EQUAL)
        job = replace(job, budget=budget_beside_others(job.budget, own, has_others=True))
        rungs = [budget_beside_others(rung, own, has_others=True) for rung in job.rungs]
        job = replace(job, rungs=tuple(filter(None, rungs)))
    if full is None:
        return job
    if not full:
        problem = f"every layer of {job.model} has a sliding window, which {job.engine} keeps exact"
        raise UsageError(problem, "to store them in 2 bits, leave out --for")
    notes = [*job.notes, f"Layers with a sliding window stay exact, as {job.engine} serves them"]
    return replace(job, layers=full, notes=notes)


def _settle_format(job: Evaluation, artifacts: list[Artifact]) -> Evaluation:
    """The job with a format. Raises `RotationZooError` for one that no artifact has."""
    has_budget = any(artifact.rotations.has_budget for artifact in artifacts)
    name = job.format or (BUDGETED if has_budget else "sglang")
    check_budget(job.budget, has_budget, name)
    if not has_budget:
        int2.check_nearest(int2.SIMULATED[name])
    notes = [*job.notes]
    if isinstance(job.budget, EvenBudget):
        notes.append("Layers in 2 bits share the budget evenly, because this model has others")
    elif job.budget:
        notes.append(f"The artifacts have a budget of {job.budget.bits} bits here, not their own")
    return replace(job, format=name, notes=notes)


def _build_caches(job: Evaluation, artifacts: list[Artifact]) -> list[CacheLayout]:
    recipe = shared_recipe(artifacts)
    windows = job.windows or [(recipe.sink, recipe.recent)]
    assert job.format is not None
    # Baselines have nearest codes, and so an engine's format, also next to transform coding.
    format = int2.SIMULATED["sglang" if job.format == BUDGETED else job.format]
    chunk, layout = job.prefill_chunk, job.prefill_layout or "server"
    return [CacheLayout(format, sink, recent, chunk, layout) for sink, recent in windows]


def _fit_rows(data: Data, start: int, config: PretrainedConfig) -> Data:
    """Rows so long that a quarter of each is measured, if the model has the positions."""
    length = data.length
    while 3 * length < 4 * start:
        length *= 2
    return data.model_copy(update={"length": min(length, position_count(config) or length)})


def _check_length(data: Data, start: int) -> None:
    """Raise `RotationZooError` for texts without measured positions, from `start` on."""
    if data.length < start + 2:
        first = f"only tokens from position {start} on read quantized ones"
        problem = f"texts of {data.length} tokens are too short: {first}"
        raise RotationZooError(problem, "give a greater --length, or smaller --windows")
    if not data.rows:
        problem = f"{counted(data.tokens, 'token')} cannot fill one text of {data.length:,}"
        raise UsageError(problem, "give more --tokens, or a shorter --length")


def text_notes(ready: Prepared, geometry: Geometry) -> list[str]:
    """Notes on a text that was too short, and on artifacts that were made for other weights, were
    calibrated on this very text, or center keys where this model's attention does not allow it."""
    notes = [ready.text.note] if ready.text.note else []
    for artifact in ready.artifacts:
        name = artifact.folder.resolve().name
        if note := other_weights_note(artifact, ready.source):
            notes.append(note)
        calibration = artifact.manifest.calibration
        if calibration is not None and calibration.fingerprint == ready.text.fingerprint:
            notes.append(f"{name} was calibrated on this very text")
        if artifact.recipe.center_keys and (layers := shifted_layers(geometry)):
            reason = shift_reason(layers)
            notes.append(f"{name} centers keys, which changes what this model computes: {reason}")
    return notes
