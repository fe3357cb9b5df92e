"""`rotationzoo report`: write a page about an artifact."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from rotationzoo.cli.next_steps import suggest_step
from rotationzoo.cli.options import ArtifactFolder, flag, option
from rotationzoo.cli.output import Output, say
from rotationzoo.errors import RotationZooError

if TYPE_CHECKING:
    from rotationzoo.artifact.store import Artifact
    from rotationzoo.report.page import Report


def report_command(
    artifact: ArtifactFolder,
    out: Output,
    output: Path = option(
        "Where to write the page.", "--output", "-o", default=Path("report.html")
    ),
    save: bool = flag("Add the page to the rotations, and its chart to the card."),
    context: int | None = option("Tokens whose memory is shown (the model's positions).", min=1),
) -> None:
    """Write a page to decide by: whether to use an artifact, what it keeps, and what it saves.

    It is one file, made from what evaluate --save and validate have stored.

    rotationzoo report rotations/demo-oscar
    """
    from rotationzoo.artifact.store import EVALUATION, Artifact
    from rotationzoo.report.page import FOOTER
    from rotationzoo.storage import files, folders

    if output.resolve().is_relative_to(folder := artifact.resolve()):  # which holds its own alone
        output = Path(os.path.relpath(folder.parent), output.name)
    if output.is_file() and FOOTER.encode() not in files.read(output, 1 << 24):
        hint = "choose another place with --output"
        raise RotationZooError(f"{output} exists and is no page of report", hint)
    opened = Artifact.open(artifact)
    report = _draw_report(out, opened, context)
    folders.replace_file(output, report.html(str(artifact)).encode())
    if save:
        add_report(out, opened, report)
    evaluated = EVALUATION in opened.manifest.files
    changed = str(artifact) if save else None
    data = {"report": str(output), "artifact": changed, "evaluated": evaluated}
    added = [f"Added to: {artifact}"] if save else []
    out.result(data, str(output), lambda: say(f"Page: {output}", *added))
    if not evaluated:
        suggest_step(out, opened)
    elif not save:
        out.suggest(*_next_words(opened, str(artifact)))
    else:
        out.suggest("push", str(artifact), "OWNER/REPO")


def _next_words(artifact: "Artifact", place: str) -> list[str]:
    """What the decision calls for, or the export to the engine that it was measured for."""
    from rotationzoo.report.commands import asked_options, decided_words, usual_engine
    from rotationzoo.report.page import label_arms

    measured, words = artifact.measured, None
    engine = measured and measured.engine
    served = ["--for", engine] if engine else []
    if measured and (decision := label_arms(measured, artifact.identity).decision):
        model, asked = [artifact.manifest.model.id], asked_options(measured)
        words = decided_words(decision, model, place, served, asked)
        if words is None and decision.action in ("ask", "nothing"):  # no answer decides
            shorter = decision.action == "nothing"
            words = ["evaluate", *model, place, *served, *["--lengths", "512"] * shorter, "--save"]
    return words or ["export", place, "--for", engine or usual_engine(artifact.manifest)]


def add_report(
    out: Output, artifact: "Artifact", report: "Report | None" = None, place: str = "FOLDER"
) -> "Artifact":
    """Add a report to an artifact as `report --save` does. Its commands name the `place`."""
    from rotationzoo.report.page import files_of_report
    from rotationzoo.writer import add_files

    return add_files(artifact, files_of_report(report or _draw_report(out, artifact), place), {})


def _draw_report(out: Output, artifact: "Artifact", context: int | None = None) -> "Report":
    from rotationzoo.report.charts import NOT_DRAWN, is_installed
    from rotationzoo.report.page import make_report

    _ = artifact.rotations  # a page must not recommend rotations that no engine can read
    report = make_report(artifact, context)
    if report.verdict.figure and not is_installed():
        out.notes([NOT_DRAWN])
    return report
