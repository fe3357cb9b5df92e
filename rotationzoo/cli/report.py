"""`rotationzoo report`: write a page about an artifact."""

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from rotationzoo.cli.output import Output, say
from rotationzoo.errors import RotationZooError
from rotationzoo.settings import ArtifactFolder
from rotationzoo.settings_base import flag, option

if TYPE_CHECKING:
    from rotationzoo.artifact.store import Artifact
    from rotationzoo.report.page import Report


def report_command(
    artifact: ArtifactFolder,
    out: Output,
    output: Path | None = option("Where to write the page (the rotations).", "--output", "-o"),
    save: bool = flag("Add the page to the rotations, and its chart to the card."),
    context: int | None = option("Tokens of the cache sizes (the model's positions).", min=1),
) -> None:
    """Write a page that says whether to use an artifact, what it keeps, and what it saves.

    It is one file, made from what evaluate --save and validate have stored.

    rotationzoo report rotations/demo-transform
    """
    from rotationzoo.artifact.store import EVALUATION, REPORT, SIGNATURE, Artifact
    from rotationzoo.report.card import replace_words
    from rotationzoo.report.page import FOOTER
    from rotationzoo.storage import files, folders

    folder, outside = artifact.resolve(), output
    # A signed artifact is not changed, and the shell's folder is not replaced.
    kept = os.path.lexists(folder / SIGNATURE) or Path.cwd().is_relative_to(folder)
    if output is None:
        save, outside = save or not kept, Path(REPORT) if kept else None
    if outside and outside.resolve().is_relative_to(folder):  # which may hold no other files
        outside = Path(os.path.relpath(folder.parent), outside.name)
    if outside and outside.is_file() and FOOTER.encode() not in files.read(outside, 1 << 24):
        hint = "choose another place with --output"
        raise RotationZooError(f"{outside} exists and is not a page that report wrote", hint)
    opened = Artifact.open(artifact)
    report = _draw_report(out, opened, context)
    if outside:
        folders.replace_file(outside, report.html(is_local=True).encode())
    if save:
        add_report(out, opened, report)
    evaluated, page = EVALUATION in opened.manifest.files, str(outside or artifact / REPORT)
    changed = str(artifact) if save else None
    data = {"report": page, "artifact": changed, "evaluated": evaluated}
    added = [f"Added to: {artifact}"] if save and outside else []
    out.result(data, page, lambda: say(f"Page: {page}", *added))
    first = replace_words(report.verdict.commands[0], report.local_names())
    out.suggest(*shlex.split(first)[1:])


def add_report(out: Output, artifact: "Artifact", report: "Report | None" = None) -> "Artifact":
    """Add a report to an artifact. Its commands name this machine's folder and model."""
    from rotationzoo.report.page import files_of_report
    from rotationzoo.writer import add_files

    report = report or _draw_report(out, artifact)
    return add_files(artifact, files_of_report(report, is_local=True), {})


def _draw_report(out: Output, artifact: "Artifact", context: int | None = None) -> "Report":
    from rotationzoo.report.charts import NOT_DRAWN, is_installed
    from rotationzoo.report.page import make_report

    _ = artifact.rotations  # a page must not recommend rotations that no engine can read
    report = make_report(artifact, context)
    if report.verdict.figure and not is_installed():
        out.notes([NOT_DRAWN])
    return report
