"""The evaluation job: a model's answers through each arm with a 2-bit KV cache, the perplexity of
each arm, and the report that `evaluate --save` keeps."""

import math
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from time import perf_counter

from transformers import PreTrainedModel

from rotationzoo.artifact import measured
from rotationzoo.artifact.measured import Measured, Probe, Verdict, Window
from rotationzoo.artifact.scores import Decision, plain_name
from rotationzoo.artifact.store import EVALUATION, Artifact
from rotationzoo.codec.size import CONTEXT, codec_bits
from rotationzoo.codec.windows import CacheLayout
from rotationzoo.errors import RotationZooError
from rotationzoo.evaluation import rungs
from rotationzoo.evaluation.arms import build_arms, judged_arms
from rotationzoo.evaluation.decision import Rule, decide, put_into_words, spend_level
from rotationzoo.evaluation.forward import Losses, Pace, Reader, Tell, Trial, run_models
from rotationzoo.evaluation.prepare import Evaluation, Prepared, check_model, prepare, text_notes
from rotationzoo.evaluation.probes import record_probes
from rotationzoo.evaluation.schedule import Schedule, find_pace
from rotationzoo.evaluation.tasks import answering
from rotationzoo.evaluation.tasks.answering import Asking, TaskAnswers, score_arm, score_exact
from rotationzoo.evaluation.tasks.resumed import SavedAnswers
from rotationzoo.model import loading
from rotationzoo.model.compatibility import check_weights, rope_notes
from rotationzoo.model.geometry import geometry_of
from rotationzoo.model.placement import place_weights
from rotationzoo.model.prediction import doubt_loss
from rotationzoo.model.source import fetch_weights, weights_fingerprint
from rotationzoo.progress import Progress, silent
from rotationzoo.recipe.rope import position_count, scaling_of
from rotationzoo.storage import strict_json
from rotationzoo.words import finish
from rotationzoo.writer import add_files, library_versions


def evaluate(
    job: Evaluation, progress: Progress = silent, tell: Tell = lambda words: None
) -> Measured:
    """Evaluate artifacts and baselines, and return all measurements. `tell` gets sentences for the
    user. Raises `UsageError` for settings that exclude each other, and `RotationZooError` for
    artifacts or texts that do not fit the model, before weights are fetched if the config can tell.
    """
    if job.tasks.minutes:
        tell(f"Loading the model, questions and texts{finish(60 * job.tasks.minutes)}.")
    ready = prepare(job, progress, tell)
    job, source = ready.job, ready.source
    fetch_weights(source, progress)
    until = perf_counter() + 60 * (job.tasks.minutes or math.inf)
    check_weights(ready.artifacts, source, job.anyway)
    saved = _saved_answers(ready)
    for note in saved.notes:
        tell(note)
    with place_weights(job.device_map, job.max_memory) as placement:
        progress("loading the model", 0, 0)
        model = loading.load(source, ready.config, job.torch_device, job.torch_dtype, placement)
        pace = Pace(tell, until)
        schedule = _schedule(ready, model, pace, progress)
        asking = Asking(model, job.model, job.batch * job.data.length, progress, pace, saved)
        if job.rungs:
            schedule, answers = _ask_rungs(schedule, asking)
        else:
            answers = _ask(schedule, asking)
        ready = schedule.ready
        with loading.forward_errors(job.model, job.batch, job.data.length):
            batches, how = ready.text.batches(job.batch), (progress, pace)
            losses = run_models(model, batches, schedule.trial, *how, schedule.record)
        notes = _notes(schedule, model, losses[None])
        probes = _record_probes(schedule, model, notes, progress)
    report = _describe(schedule, losses, answers, notes)
    for artifact in ready.saved:
        save_evaluation(report, artifact, probes.get(artifact.folder, []))
    saved.remove()
    return report


def _saved_answers(ready: Prepared) -> SavedAnswers:
    """The answers before an interrupt, next to the first artifact that gets the report."""
    if not ready.saved:
        return SavedAnswers()
    folder = ready.saved[0].folder
    artifacts = [artifact.identity for artifact in ready.artifacts]
    conditions = f"{ready.job} {artifacts} {weights_fingerprint(ready.source)} {library_versions()}"
    return SavedAnswers(folder.with_name(f"{folder.name}.answers.safetensors"), conditions)


def _schedule(ready: Prepared, model: PreTrainedModel, pace: Pace, progress: Progress) -> Schedule:
    """The work, fitted to the time by the pace of the model's first tokens and told to the user."""
    job, artifacts, geometry = ready.job, ready.artifacts, ready.geometry
    if geometry is None:
        geometry = geometry_of(model)
        check_model(job, artifacts, geometry)
    budgets = job.rungs or [job.budget]
    arms = build_arms(artifacts, geometry, job.baselines, job.pooled, job.uncentered, budgets)
    # The chosen layers, which own a cache, and all layers that read one of these caches.
    read = [layer for layer in geometry if job.layers is None or layer.owner in job.layers]
    layers = sorted(layer.index for layer in read)
    timed = trial = Trial(geometry, arms, ready.caches, layers, ready.start)
    judged = judged_arms(arms, job.format, job.pooled)
    if job.rungs:  # other arms are asked once a rung is chosen
        timed = replace(trial, arms=[arm for arm in arms if arm.name in judged])
    progress("finding the pace", 0, 0)
    with loading.forward_errors(job.model, 1, job.data.length):
        find_pace(model, ready.text.rows[0], timed, pace)
    schedule = Schedule(ready, trial, judged, pace).fit()
    schedule.tell()
    return schedule


def _ask(schedule: Schedule, asking: Asking) -> TaskAnswers:
    """The answers to questions, asked until all judged arms are decided or the time is over."""
    plan, judged, looks = schedule.ready.plan, schedule.judged, schedule.ready.job.tasks.looks

    def open_arms(answers: TaskAnswers) -> Collection[str]:
        if plan.settings.minutes:
            fits = schedule.fitting(answers.plan.series, answers.questions)
            return (judged or schedule.names) if fits else ()
        # The first pair of windows decides: its figures are shown.
        decisions = _decide(schedule, schedule.trial.caches[0], answers)
        is_open = any(decision.action == "ask" for decision in decisions)
        return judged if is_open or answers.questions < looks[0] else ()

    trial, is_short = schedule.trial, schedule.is_short
    return answering.answer_tasks(asking, plan, trial, open_arms, is_short=is_short)


def _ask_rungs(schedule: Schedule, asking: Asking) -> tuple[Schedule, TaskAnswers]:
    """Ask the budgets until the fewest bits that may be served are known, then all arms with these
    bits; or with the most bits, if even these may not be served."""
    ready, trial, judged = schedule.ready, schedule.trial, schedule.judged
    cache, found = trial.caches[0], dict[str, TaskAnswers]()
    # Half of the level for each direction; of two rungs, none is above the middle.
    share = 0.5 if len(judged) > 2 else 1.0

    def ask(name: str) -> Decision:
        arms = [arm for arm in trial.arms if arm.name == name]
        rung = replace(schedule, trial=replace(trial, arms=arms), judged=[name])

        def open_arms(answers: TaskAnswers) -> Collection[str]:
            (decision,) = _decide(rung, cache, answers, share)
            return [name] if decision.action == "ask" else ()

        found[name] = answering.answer_tasks(asking, ready.plan, rung.trial, open_arms)
        if asking.saved.was_left:
            raise KeyboardInterrupt
        return _decide(rung, cache, found[name], share)[0]

    decisions = rungs.ask_rungs(judged, ask)
    ready.plan.notes.extend(rungs.describe_rungs(decisions))
    chosen = rungs.choose_rung(decisions)
    schedule = _choose_rung(schedule, chosen)
    others = [arm for arm in schedule.trial.arms if arm.name != chosen.arm]
    trial = replace(schedule.trial, arms=others)
    return schedule, answering.ask_also(asking, trial, found[chosen.arm])


def _choose_rung(schedule: Schedule, chosen: Decision) -> Schedule:
    """The schedule for the chosen budget, whose artifact is written if it may be served."""
    job, (artifact,) = schedule.ready.job, schedule.ready.artifacts
    name, save_to = plain_name(chosen.arm), list[Path]()
    if chosen.action == "serve" and job.save_to:
        budget = job.rungs[schedule.judged.index(chosen.arm)]
        artifact = rungs.write_rung(artifact, budget, name)
        save_to = [artifact.folder]
    arms = []
    for arm in schedule.trial.arms:
        if plain_name(arm.name) == name:
            about = arm.about.model_copy(update={"artifact": artifact.identity})
            arms.append(replace(arm, about=about))
    trial = replace(schedule.trial, arms=arms)
    ready = replace(schedule.ready, job=replace(job, save_to=save_to), artifacts=[artifact])
    judged = judged_arms(trial.arms, job.format, job.pooled)
    return replace(schedule, ready=ready, trial=trial, judged=judged)


def _notes(schedule: Schedule, model: PreTrainedModel, exact: Losses) -> list[str]:
    """The report's notes on the settings, the artifacts, the text and the model."""
    ready = schedule.ready
    vocabulary = ready.config.get_text_config(decoder=True).vocab_size
    return [
        *ready.job.notes,
        *text_notes(ready, schedule.trial.geometry),
        *rope_notes(ready.artifacts, ready.scaling),
        *doubt_loss(math.log(exact.perplexity), vocabulary),
    ]


def _record_probes(
    schedule: Schedule, model: PreTrainedModel, notes: list[str], progress: Progress
) -> dict[Path, list[Probe]]:
    """A record of server answers for each artifact that gets the report, or a note why not."""
    probes, ready = dict[Path, list[Probe]](), schedule.ready
    # A server takes the RoPE scaling of the config.
    if not ready.job.record or ready.scaling is not None:
        return probes
    if schedule.record > schedule.pace.left:
        notes.append("there was no time to record what a server answers")
        return probes
    for artifact in ready.saved:
        progress("recording what a server answers", 0, 0)
        try:
            probes[artifact.folder] = record_probes(model, ready.tokenizer, artifact, ready.source)
        except RotationZooError as error:
            name = artifact.folder.resolve().name
            notes.append(f"{name} gets no record of what a server answers: {error}")
    return probes


def _describe(
    schedule: Schedule, losses: dict[Reader, Losses], answers: TaskAnswers, notes: list[str]
) -> Measured:
    """All measurements and their conditions."""
    ready, trial = schedule.ready, schedule.trial
    job, source, text = ready.job, ready.source, ready.text
    tasks, all_tasks = score_exact(answers)
    exact = measured.Exact(**dict(losses[None].measure_exact()), tasks=tasks, all_tasks=all_tasks)
    windows, rows = [], len(exact.text_tokens)
    for cache in trial.caches:
        arms = {}
        for arm in trial.arms:
            task_scores, total = score_arm(answers, cache, arm.name)
            arms[arm.name] = measured.MeasuredArm(
                **dict(arm.about),
                **dict(losses[cache, arm.name].measure_arm(losses[None])),
                tasks=task_scores,
                all_tasks=total,
                bits_per_element=codec_bits(trial.geometry, arm.codec, cache, CONTEXT),
                bits_at_length=codec_bits(trial.geometry, arm.codec, cache, job.data.length),
            )
        answered = {name: arm.tasks for name, arm in arms.items()}
        bits = {name: arm.bits_per_element for name, arm in arms.items()}
        made = _decide(schedule, cache, answers)
        decisions = [put_into_words(each, answered, tasks, bits) for each in made]
        decisions = [schedule.time_more(each, answers) for each in decisions]
        verdict = Verdict.of(rows, decisions)
        windows.append(Window(sink=cache.sink, recent=cache.recent, arms=arms, verdict=verdict))
    assert job.format is not None
    about, length = {"source": job.data.label, "fingerprint": text.fingerprint}, job.data.length
    return Measured(
        text=measured.Text(**about, rows=rows, length=length),
        tokens=sum(exact.text_tokens),
        first_position=trial.start,
        model=source.label,
        revision=source.revision,
        weights_fingerprint=weights_fingerprint(source),
        format=job.format,
        layers=trial.layers,
        prefill_chunk=job.prefill_chunk,
        prefill_layout=ready.caches[0].prefill_layout if job.prefill_chunk else None,
        notes=notes + answers.notes,
        rope_scaling=scaling_of(ready.config),
        engine=job.engine,
        positions=position_count(ready.config),
        tasks=answers.plan.describe(answers.questions),
        exact=exact,
        windows=windows,
    )


def _decide(
    schedule: Schedule, cache: CacheLayout, answers: TaskAnswers, share: float = 1.0
) -> list[Decision]:
    """The decision on each judged arm with one cache and a `share` of the level, without words."""
    exact, _ = score_exact(answers)
    arms = {arm.name: score_arm(answers, cache, arm.name)[0] for arm in schedule.trial.arms}
    level = share * spend_level(answers.questions, answers.plan.settings.looks)
    rule = Rule(schedule.ready.job.keep / 100, level)
    return [decide(name, arms, exact, answers.questions, rule) for name in schedule.judged]


def save_evaluation(report: Measured, artifact: Artifact, probes: list[Probe]) -> None:
    """Add `evaluation.json` to an artifact: its own arms, the baselines, and the server record."""
    windows = []
    for window in report.windows:
        arms, identities = window.arms.items(), (artifact.identity, None)
        kept = {name: arm for name, arm in arms if arm.artifact in identities}
        decisions = [each for each in window.verdict.decisions if each.arm in kept]
        verdict = Verdict.of(window.verdict.texts, decisions)
        windows.append(window.model_copy(update={"arms": kept, "verdict": verdict}))
    evaluation = report.model_copy(update={"windows": windows, "probes": probes})
    content = strict_json.text(evaluation.model_dump())
    summary = evaluation.summary().model_dump()
    add_files(artifact, {EVALUATION: content}, {"evaluation": summary})
