"""The evaluation job: what a model answers through every arm with a 2-bit KV cache, and what each
arm costs in perplexity, attention KL and output error."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from rotationzoo.artifact.measured import Measured, Probe, Text
from rotationzoo.artifact.store import Artifact
from rotationzoo.calibration.pooling import check_pooled, has_statistics, reduced_rotations
from rotationzoo.codec import int2
from rotationzoo.codec.budget import (
    Bits,
    average_fine_channels,
    bits_beside_windows,
    check_bits,
)
from rotationzoo.codec.formats import BUDGETED
from rotationzoo.codec.layout import CacheLayout
from rotationzoo.errors import RotationZooError, UsageError
from rotationzoo.evaluation.arms import (
    BASELINES,
    RIVALS,
    build_arms,
    check_rivals,
    judged_arms,
    shared_recipe,
)
from rotationzoo.evaluation.compatibility import (
    check_artifacts,
    check_layers,
    check_length,
    check_weights,
    fit_rows,
    judged_text,
    notes_for_reader,
    rope_notes,
    settle_rope_scaling,
)
from rotationzoo.evaluation.decision import SIMPLEST
from rotationzoo.evaluation.drift import measure_drift
from rotationzoo.evaluation.forward import Through, Trial, run_models
from rotationzoo.evaluation.pace import Pace, Tell, tell_nobody
from rotationzoo.evaluation.report import Results, assemble_report, decide_all, save_evaluation
from rotationzoo.evaluation.tasks.answering import (
    Asking,
    TaskAnswers,
    answer_tasks,
    describe_rounds,
)
from rotationzoo.evaluation.tasks.prompts import TaskPlan, TaskSettings, plan_tasks
from rotationzoo.geometry import Geometry, has_latents
from rotationzoo.model import loading
from rotationzoo.model.geometry import geometry_of, geometry_on_meta
from rotationzoo.model.loading import RunSettings
from rotationzoo.model.placement import place_weights
from rotationzoo.model.prediction import doubt_loss
from rotationzoo.model.quantized import check_loadable
from rotationzoo.model.rope import check_positions, position_count, scaling_of
from rotationzoo.model.source import Source, fetch, fetch_weights, find, weights_fingerprint
from rotationzoo.progress import Progress, silent
from rotationzoo.recipe import Data
from rotationzoo.text.rows import read_corpus
from rotationzoo.words import duration, nearest

_LONG = 120  # seconds of texts, after which a shorter evaluation is named
Recorder = Callable[[PreTrainedModel, PreTrainedTokenizerBase, Artifact, Source], list[Probe]]
"""`runtime.vllm.probe.record_probes`, which stands above this package: callers hand it in."""


@dataclass(frozen=True)
class Evaluation(RunSettings):
    """The settings of one evaluation, as the user gave them."""

    model: str
    artifacts: list[Path]
    data: Data
    tasks: TaskSettings = field(default_factory=TaskSettings)
    """The recall tasks that the model is asked."""
    windows: list[tuple[int, int]] = field(default_factory=list)
    """Pairs of sink and recent tokens. If empty, the recipe's pair is used."""
    format: str | None = None
    """The cache format: a name in `int2.SIMULATED`. None means `sglang`, or `fine` for a budget of
    bits."""
    bits: Bits = None
    """The budget of bits of the artifacts' arms; None for their own."""
    anyway: bool = False
    """Whether artifacts that were made for other weights are measured, too."""
    layers: set[int] | None = None
    """The layers whose cache is stored in 2 bits; None for all."""
    sides: tuple[str, ...] = ("key", "value")
    """Which of keys and values are stored in 2 bits."""
    prefill_chunk: int | None = None
    """Tokens per prefill chunk. None simulates decoding at every position."""
    prefill_layout: Literal["server", "window"] | None = None
    """The tokens that earlier chunks keep exact, as in `Cache`. None means `server`."""
    real_cache: bool = False
    """Whether recall tasks are read through a real cache, not a simulation."""
    drift: int = 0
    """How many tokens the exact model generates for a real cache. It adds arms of `pooled`."""
    queries: int = 32
    """How many queries per row are sampled for the attention KL; 0 skips it."""
    rope_scaling: str | None = None
    """How the model's RoPE is scaled, as in a recipe. None means as the artifacts were
    calibrated."""
    baselines: tuple[str, ...] = BASELINES
    """The baselines to compare with, names in `BASELINES` and `RIVALS`."""
    pooled: bool = False
    """Whether to measure each artifact with one rotation per layer, too, as `export --pooled`
    writes it."""
    rounding: Literal["nearest", "feedback"] | None = None
    """The codes of the arm that the decision is about. None means feedback where an artifact has
    the factors. With `pooled`, it is about one rotation per layer."""
    uncentered: tuple[str, ...] = ()
    """The sides that artifacts' arms store with their mean, as engines do that subtract none."""
    engine: str | None = None
    """The engine that these settings were picked for."""
    beside_windows: str | None = None
    """The format of layers with full attention beside layers with a sliding window, which stay
    exact, where a budget of bits is left out. None stores all layers alike."""
    notes: list[str] = field(default_factory=list)
    """What the report says of these settings."""
    batch: int = 1
    save_to: list[Path] = field(default_factory=list)
    """The artifacts, among those evaluated, to which the report is added."""
    record: Recorder | None = None
    """Records what a server answers, in each artifact to which the report is added."""
    fit_length: bool = False
    """Whether rows too short for the windows are made longer, and rows of more tokens than the
    model has positions shorter, instead of refused. True if the length is a default and not the
    user's choice."""


def evaluate(
    job: Evaluation,
    progress: Progress = silent,
    through: Through | None = None,
    tell: Tell = tell_nobody,
) -> Measured:
    """Evaluate artifacts and baselines, and return everything that was measured.

    - `through` makes the reader of a job's real cache: `runtime.through_cache.ThroughCache`;
    - `tell` is given how long the evaluation takes, once that is known.

    Raises `UsageError` for settings that exclude each other, and `RotationZooError` for artifacts,
    layers or texts that do not fit the model. Where the config is enough to tell, the error comes
    before any weights are fetched.
    """
    _check_settings(job)
    assert through or not (job.real_cache or job.drift), "a real cache needs its reader"
    artifacts = [Artifact.open(folder) for folder in job.artifacts]
    # Fail now if the report could not be saved, not after hours of evaluation.
    saved = [artifact for artifact in artifacts if artifact.folder in job.save_to]
    for artifact in saved:
        artifact.check_writable()
    if job.pooled:
        check_pooled(artifacts)
    progress("looking at the model", 0, 0)
    source = find(job.model, job.revision)
    scaling = settle_rope_scaling(job.rope_scaling, artifacts, source)
    config = loading.load_config(source, scaling)
    job = _settle_format(_leave_windows(job, artifacts, config), artifacts)
    pooled = job.pooled or (job.drift > 0 and all(map(has_statistics, artifacts)))
    caches = _build_caches(job, artifacts)
    # Every pair of windows is measured on the tokens that read quantized positions with all pairs.
    start = max(cache.first_quantized for cache in caches)
    if job.fit_length:
        job = replace(job, data=fit_rows(job.data, start, config))
    device = job.torch_device
    check_loadable(config, source.name, device)
    dtype = job.torch_dtype
    on_meta = loading.on_meta(config, source.name)
    geometry = geometry_on_meta(on_meta)
    if geometry is not None:
        _check_model(job, artifacts, geometry)
    check_positions(config, job.data.length, "texts", "add: --length {}")
    job.tasks.check_positions(config)
    check_length(job.data, start)
    shorter = "give a smaller --drift" if job.drift else "add: --length {}"
    check_positions(config, start + 1 + job.drift, "texts", shorter)
    # The text needs only the tokenizer and may be refused, so it is read before the weights.
    fetch(source, weights=False)
    tokenizer, data = loading.load_tokenizer(source), judged_text(job.data)
    progress("reading the text", 0, 0)
    text = read_corpus(data, tokenizer)
    loading.check_ids(text.rows, config, job.model)
    plan = plan_tasks(job.tasks, data, text, tokenizer, caches)
    fetch_weights(source, progress)
    check_weights(artifacts, source, job.anyway)
    with place_weights(job.device_map, job.max_memory) as placement:
        progress("loading the model", 0, 0)
        model = loading.load(source, config, device, dtype, placement)
        if geometry is None:  # the model does not run on `meta`
            geometry = geometry_of(model)
            _check_model(job, artifacts, geometry)
        variants = pooled, job.uncentered, job.bits
        arms = build_arms(artifacts, geometry, job.baselines, *variants)
        layers = _layers_in_2_bits(job, geometry)
        judged = judged_arms(arms, job.rounding, job.pooled)
        deciding, pace = (*judged, *SIMPLEST), Pace(tell)
        tell_length = partial(_tell_length, pace, job, plan, deciding)

        def is_settled(answers: TaskAnswers) -> bool:
            # The first pair of windows, whose figures are shown, ends the questions.
            decisions = decide_all(answers, caches[0], judged)
            return all(decision.action != "ask" for decision in decisions)

        reader = through if job.real_cache else None
        trial = Trial(geometry, arms, caches, layers, job.sides, job.queries, start, reader)
        with loading.forward_errors(job.model, job.batch, job.data.length):
            batches, drift = text.batches(job.batch), None
            measured = run_models(model, batches, trial, progress, pace, tell_length)
            if through and job.drift:
                drift = measure_drift(model, batches, trial, through, job.drift, progress)
        asking = Asking(model, job.model, job.batch * job.data.length, progress, pace)
        answers = answer_tasks(asking, plan, trial, is_settled, deciding)
        notes = [*job.notes, *notes_for_reader(text, source, artifacts, geometry)]
        notes += loading.notes_of(model)
        notes += rope_notes(artifacts, scaling)
        perplexity = measured.exact.measure_exact().perplexity
        notes += doubt_loss(math.log(perplexity), config.get_text_config(decoder=True).vocab_size)
        probes: dict[Path, list[Probe]] = {}
        # A server runs the model as its config says.
        if job.record and scaling is None:
            progress("recording what a server answers", 0, 0)
            for artifact in saved:
                try:
                    probes[artifact.folder] = job.record(model, tokenizer, artifact, source)
                except RotationZooError as error:
                    name = artifact.folder.resolve().name
                    notes.append(f"{name} gets no record of what a server answers: {error}")
    layout = caches[0].prefill_layout if job.prefill_chunk else None
    results = Results(trial, judged, measured, answers)
    report = assemble_report(
        results,
        text=Text(
            source=job.data.label,
            fingerprint=text.fingerprint,
            rows=len(text.rows),
            length=job.data.length,
        ),
        model=source.label,
        revision=source.revision,
        weights_fingerprint=weights_fingerprint(source),
        format=job.format,
        sides=list(job.sides),
        prefill_chunk=job.prefill_chunk,
        prefill_layout=layout,
        real_cache=job.real_cache,
        drift=drift,
        notes=notes,
        rope_scaling=scaling_of(config),
        engine=job.engine,
        positions=position_count(config),
    )
    for artifact in saved:
        save_evaluation(report, artifact, probes.get(artifact.folder, []))
    return report


def _tell_length(
    pace: Pace, job: Evaluation, plan: TaskPlan, deciding: Collection[str], left: int
) -> None:
    """Tell how long the texts take, of which so many tokens are `left`, and the questions."""
    words = [] if job.artifacts else ["no rotations are named, so these are baselines alone"]
    words.append(f"reading the texts: about {duration(pace.estimate(left))} more")
    if plan.series and not job.real_cache:  # which has a pace of its own
        words.append(describe_rounds(pace, plan.series, job.tasks.looks, deciding))
        words.append("Ctrl-C after a round keeps what was asked")
    if pace.estimate(left) > _LONG:
        words.append("--tokens 4096 --tasks needles,key-value takes less")
    pace.tell("; ".join(words))


def _check_settings(job: Evaluation) -> None:
    if job.format not in (None, *int2.SIMULATED):
        formats = ", ".join(int2.SIMULATED)
        raise UsageError(f"there is no format {job.format!r}", hint=f"give one of {formats}")
    known = (*BASELINES, *RIVALS)
    for name in job.baselines:
        if name not in known:
            raise UsageError(
                f"there is no rival {name!r}{nearest(name, known)}",
                hint=f"give some of {', '.join(RIVALS)}",
            )
    if job.prefill_layout and job.prefill_chunk is None:
        raise UsageError(
            "--prefill-layout is for a prefill in chunks", hint="add: --prefill-chunk 2048"
        )
    if (job.real_cache or job.drift) and (job.layers is not None or len(job.sides) < 2):
        raise UsageError(
            "a real cache stores keys and values of all layers",
            hint=f"leave out {'--real-cache' if job.real_cache else '--drift'}",
        )
    job.tasks.check()
    _ = job.memory_limits  # for its errors


def _check_model(job: Evaluation, artifacts: list[Artifact], geometry: Geometry) -> None:
    if job.layers is not None:
        check_layers(job.model, job.layers, geometry)
    check_artifacts(job.model, artifacts, geometry)
    check_rivals(job.baselines, geometry)
    if len(job.sides) < 2 and has_latents(geometry):
        raise UsageError(
            f"{job.model} caches latents, which are keys and values at once",
            hint=f"leave out --{job.sides[0]}s-only",
        )


def _leave_windows(
    job: Evaluation, artifacts: list[Artifact], config: PretrainedConfig
) -> Evaluation:
    """The job of an engine that keeps layers with a sliding window exact. A real cache stores every
    layer, and layers that were named are those to store."""
    full = loading.full_attention_layers(config)
    if not job.beside_windows or full is None:
        return job
    has_budget = any(artifact.rotations.has_budget for artifact in artifacts)
    bits = bits_beside_windows(job.bits, has_budget, has_windows=True)
    if bits == "equal":
        notes = [*job.notes, "Beside layers with a sliding window, the budget of bits is left out"]
        job = replace(job, bits=bits, format=job.beside_windows, notes=notes)
    if job.layers or job.real_cache or job.drift:
        return job
    if not full:
        raise UsageError(
            f"every layer of {job.model} has a sliding window, which {job.engine} keeps exact",
            hint="to store them in 2 bits, leave out --for",
        )
    notes = [*job.notes, f"Layers with a sliding window stay exact, as {job.engine} serves them"]
    return replace(job, layers=full, notes=notes)


def _settle_format(job: Evaluation, artifacts: list[Artifact]) -> Evaluation:
    """The job with the format that it leaves to the artifacts."""
    has_budget = any(artifact.rotations.has_budget for artifact in artifacts)
    name = job.format or (BUDGETED if has_budget else "sglang")
    check_bits(job.bits, has_budget, name)
    if job.bits not in (None, "equal"):
        said = f"The artifacts have a budget of {job.bits} bits here, and not their own"
        job = replace(job, notes=[*job.notes, said])
    return replace(job, format=name)


def _build_caches(job: Evaluation, artifacts: list[Artifact]) -> list[CacheLayout]:
    """One cache per pair of windows."""
    recipe = shared_recipe(artifacts)
    windows = job.windows or [(recipe.sink, recipe.recent)]
    assert job.format is not None
    format = int2.SIMULATED[job.format]
    if format.offset == "none" and artifacts:
        spent = reduced_rotations(artifacts[0], False, (), job.bits)
        if spent.has_budget:  # the baselines take as many bytes as the first artifact
            format = replace(format, fine_channels=average_fine_channels(spent))
    layout = job.prefill_layout or "server"
    return [
        CacheLayout(format, sink, recent, job.prefill_chunk, layout) for sink, recent in windows
    ]


def _layers_in_2_bits(job: Evaluation, geometry: Geometry) -> list[int]:
    """The chosen layers, which own a cache, and all layers that read one of these caches."""
    if job.layers is None:
        return sorted(layer.index for layer in geometry)
    return sorted(layer.index for layer in geometry if layer.owner in job.layers)
