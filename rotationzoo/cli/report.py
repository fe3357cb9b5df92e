"""`rotationzoo report`: write a page about an artifact, and its pictures as files."""

from pathlib import Path
from typing import Annotated

import typer

from rotationzoo.cli.completion import complete_artifact
from rotationzoo.cli.options import ArtifactFolder, Json, Quiet
from rotationzoo.cli.output import Output, say


def report_command(
    artifact: ArtifactFolder,
    compare: Annotated[
        list[Path] | None,
        typer.Option(
            help="Another artifact to compare with. May be repeated.",
            autocompletion=complete_artifact,
        ),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the page.")] = Path(
        "report.html"
    ),
    png: Annotated[
        Path | None, typer.Option(help="Also write every picture to this folder, as PNG.")
    ] = None,
    svg: Annotated[
        Path | None, typer.Option(help="Also write every picture to this folder, as SVG.")
    ] = None,
    save: Annotated[
        bool,
        typer.Option("--save", help="Add the page and two pictures to the artifact and its card."),
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a page about an artifact: what it keeps, what it costs, and why.

    It is one file, made from what evaluate --save and validate have stored.

    rotationzoo report rotations/demo-oscar --compare rotations/demo-oscar-v1
    """
    out = Output(json, quiet)
    from rotationzoo.artifact.store import EVALUATION, Artifact
    from rotationzoo.cli.artifact_view import suggest_step
    from rotationzoo.pages.report import make_report, save_report, write_pictures
    from rotationzoo.storage import files

    opened = Artifact.open(artifact)
    others = [Artifact.open(folder) for folder in compare or []]
    report = make_report(opened, others)
    with files.disk_errors(output):
        files.replace(output, report.html().encode())
    pictures: list[Path] = []
    for kind, folder in (("png", png), ("svg", svg)):
        if folder is not None:
            pictures += write_pictures(report, folder, kind)
    if save:
        save_report(opened, report)
    evaluated = EVALUATION in opened.manifest.files
    written = list(map(str, pictures))
    data = {
        "report": str(output),
        "pictures": written,
        "artifact": str(artifact) if save else None,
        "evaluated": evaluated,
    }
    out.result(data, str(output), lambda: say(*_lines(output, artifact, pictures, save)))
    if not evaluated:
        suggest_step(out, opened)
    elif not save:
        out.suggest("report", str(artifact), "--save")
    else:
        out.suggest("push", str(artifact), "OWNER/REPO")


def _lines(output: Path, artifact: Path, pictures: list[Path], saved: bool) -> list[str]:
    lines = [f"Page: {output}"]
    if pictures:
        folders = dict.fromkeys(str(path.parent) for path in pictures)
        lines.append(f"Pictures: {len(pictures)} in {' and '.join(folders)}")
    if saved:
        lines.append(f"Added to the artifact: {artifact}")
    return lines
