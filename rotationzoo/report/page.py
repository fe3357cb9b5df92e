"""The report on an artifact: a page to decide by, in one HTML file."""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from markupsafe import Markup

from rotationzoo.artifact.measured import Measured, MeasuredArm, arms_of, served_arm
from rotationzoo.artifact.scores import ALL_ELSE, Decision, kept_share, plain_name
from rotationzoo.artifact.store import ANSWERS, REPORT, Artifact
from rotationzoo.codec.size import CONTEXT, EXACT_BITS
from rotationzoo.geometry import cached_layers
from rotationzoo.model.source import model_words
from rotationzoo.report import tables
from rotationzoo.report.card import FOLDER, render, replace_words, reproduce_command, use_commands
from rotationzoo.report.charts import Figure, Point, draw_png, is_installed
from rotationzoo.report.tables import Request, stored_bits
from rotationzoo.words import numbers, percent

FOOTER = "Made from stored figures by rotationzoo"
"""Marks a file as our page."""
EXACT = "exact model"
_WORDS = {
    "identity": "no rotation",
    "hadamard": "Hadamard, one by one",
    ALL_ELSE: "Hadamard, else equal",
    "random": "random, one by one",
    "kivi": "KIVI",
}


@dataclass(frozen=True)
class Advice:
    """What to do with an artifact: the conclusion, why, commands to copy, and a chart."""

    lead: str
    words: Sequence[str]
    commands: Sequence[str]
    figure: Figure | None = None


@dataclass(frozen=True)
class Arms:
    """The arms that a report shows: label and arm, the artifact's first, then the baselines.
    `chosen`: the artifact's arm that the `decision` is on, which older versions did not make."""

    evaluation: Measured
    chosen: MeasuredArm | None
    decision: Decision | None
    shown: list[tuple[str, MeasuredArm]]


@dataclass(frozen=True)
class Report:
    """The content of a report: the section to decide by, and what readers unfold."""

    artifact: Artifact
    verdict: Advice
    arms: Arms | None

    def local_names(self) -> dict[str, str]:
        """This machine's folder and model, by their names in commands."""
        model, *_ = model_words(self.artifact)
        of_model = {self.artifact.manifest.model.id: model, "MODEL": model}
        return {**of_model, FOLDER: str(self.artifact.folder)}

    def html(self, is_local: bool = False) -> str:
        """The page, which names this machine's folder and model if it `is_local`. Its policy lets a
        browser run only `page.js` and load nothing: even an unescaped name could do nothing."""
        manifest, files = self.artifact.manifest, self.artifact.manifest.files
        named = self.local_names() if is_local else {}
        commands = [replace_words(command, named) for command in self.verdict.commands]
        made = reproduce_command(manifest)
        names = sorted(files.keys() - {ANSWERS, REPORT})  # which are made from the others
        rows = [[name, f"{files[name].size:,}", files[name].sha256] for name in names]
        here = Path(__file__)
        style, script = (here.with_suffix(end).read_text("utf-8") for end in (".css", ".js"))
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        return render(
            "report.html.jinja",
            style=Markup(style),
            script=Markup(script),
            script_policy=f"sha256-{digest}",
            report=replace(self, verdict=replace(self.verdict, commands=commands)),
            manifest=manifest,
            recipe=self.artifact.recipe,
            layers=cached_layers(self.artifact.geometry),
            command=made and replace_words(made, named),
            files=tables.Table("Files", ["file", "bytes", "sha256"], rows),
            made=FOOTER,
        )


def make_report(artifact: Artifact, context: int | None = None) -> Report:
    """A report from what an artifact stores. `context`: tokens of the request whose memory is
    shown, by default the model's positions if known. Raises `RotationZooError` for damage."""
    measured = artifact.measured
    arms = None if measured is None else label_arms(measured, artifact.identity)
    context = context or (measured and measured.positions) or CONTEXT
    request = Request.measured_on(artifact, measured, context)
    commands = use_commands(artifact.manifest, measured, arms.decision if arms else None)
    if arms is None:
        bits = stored_bits(artifact, context)
        words = ["Nothing shows yet what these rotations keep.", request.describe_saving(bits)]
        return Report(artifact, Advice("Measure them first.", words, commands), None)
    lead, reasons = "", list(arms.evaluation.window.verdict.words)
    if arms.decision is not None and arms.decision.words:
        lead, *reasons = arms.decision.words
    if arms.chosen is not None:
        bits = request.arm_bits(arms.chosen, arms.evaluation)
        reasons.append(request.describe_saving(bits))
    return Report(artifact, Advice(lead, reasons, commands, _draw_answers(arms, request)), arms)


def label_arms(evaluation: Measured, identity: str) -> Arms:
    """The labeled arms of an evaluation of the artifact with this identity."""
    arms = evaluation.window.arms
    ours, shown = arms_of(arms, identity), list[tuple[str, MeasuredArm]]()
    has_others = any(arm.rounding != "nearest" for arm in ours)
    for arm in ours:
        name = arm.name
        if arm.rounding != "nearest":
            name = plain_name(name)
        elif has_others and not arm.pooled:
            name = "rounded one by one"
        shown.append((name, arm))
    baselines = [arm for arm in arms.values() if arm.kind == "baseline"]
    shown += [(_WORDS.get(arm.name, arm.name), arm) for arm in baselines]
    pairs = product(ours, evaluation.window.verdict.decisions)
    decided = ((arm, decision) for arm, decision in pairs if decision.arm == arm.name)
    chosen, decision = next(decided, (served_arm(arms, identity, evaluation.format), None))
    return Arms(evaluation, chosen, decision, shown)


def files_of_report(report: Report, is_local: bool = False) -> dict[str, bytes]:
    """The page and the card's picture, by file name."""
    added, figure = {REPORT: report.html(is_local).encode()}, report.verdict.figure
    if figure and is_installed():
        added[ANSWERS] = draw_png(figure.chart, figure.title)
    return added


def _draw_answers(arms: Arms, request: Request) -> Figure | None:
    """The share of answers that each cache keeps, over its memory; None if there are no answers."""
    measured = arms.evaluation
    exact, decision = measured.exact.all_tasks, arms.decision
    if exact is None or not exact.answered:
        return None
    scale, unit = request.scale
    points = [Point(EXACT, EXACT_BITS * scale, 1.0, percent(1.0))]
    title = f"Answers that are kept (prompts of {numbers(measured.tasks.lengths)} tokens)"
    for label, arm in arms.shown:
        share = kept_share(measured.exact.tasks, arm.tasks)
        if share is None:
            continue
        is_chosen = arm is arms.chosen
        is_less = arm.all_tasks is not None and arm.all_tasks.questions < exact.questions
        words = percent(share) + "*" * is_less
        interval = decision.interval if is_chosen and decision is not None else None
        memory = request.arm_bits(arm, measured) * scale
        points.append(Point(label, memory, share, words, is_chosen, interval))
    if any(point.percent.endswith("*") for point in points):
        title += "; *: of fewer questions"
    return Figure(title, points, unit)
