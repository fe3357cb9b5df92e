"""The report on an artifact: one page to decide by, and its pictures as files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rotationzoo.artifact.reproduce import name_in_commands
from rotationzoo.artifact.store import ANSWERS, REPORT, SPECTRA, Artifact
from rotationzoo.artifact.writer import add_files
from rotationzoo.charts.drawing import draw_png, draw_svg
from rotationzoo.pages.answers import DECISION, describe_decision, describe_needles
from rotationzoo.pages.arms import gather_arms
from rotationzoo.pages.cost import describe_growth
from rotationzoo.pages.figures import Figure, Section
from rotationzoo.pages.heads import describe_heads, describe_ranges
from rotationzoo.pages.memory import describe_memory
from rotationzoo.pages.page import render_page
from rotationzoo.pages.provenance import (
    Badge,
    describe_badges,
    describe_identity,
    describe_making,
    describe_use,
)
from rotationzoo.pages.spectra import describe_clips, describe_spectra
from rotationzoo.storage import files

_UNMEASURED = (
    "Nothing has been measured of what these rotations keep and cost. To measure it and to see it "
    "here, run: rotationzoo evaluate {} ARTIFACT --save"
)


_ON_CARD = {"answers": ANSWERS, "spectra-keys": SPECTRA}
"""The pictures of the page that a card shows -> their files."""


@dataclass(frozen=True)
class Report:
    """What a report shows of an artifact."""

    model: str
    recipe: str
    identity: list[tuple[str, str]]
    badges: list[Badge]
    sections: list[Section]
    version: str

    @property
    def figures(self) -> list[Figure]:
        """The pictures of all sections, in their order."""
        return [figure for section in self.sections for figure in section.figures]

    def html(self) -> str:
        """The page, as one file."""
        return render_page("report.html.jinja", report=self)


def make_report(artifact: Artifact, others: Sequence[Artifact] = ()) -> Report:
    """A report from what is stored in an artifact, with the arms of `others` beside its own where
    they were measured in the same way. No model is read.

    Raises `RotationZooError` for a damaged file.
    """
    arms = gather_arms(artifact, others)
    model = artifact.manifest.model
    decision = Section("decide", DECISION, [_UNMEASURED.format(name_in_commands(model))])
    measured: list[Section] = []
    if arms is not None:
        decision = describe_decision(arms)
        measured = [
            describe_needles(arms),
            describe_growth(arms),
            *describe_heads(arms),
            describe_ranges(arms),
        ]
    sections = [
        decision,
        *measured,
        describe_spectra(artifact),
        describe_clips(artifact),
        describe_memory(artifact, None if arms is None else arms.evaluation),
        describe_use(artifact),
        describe_making(artifact),
    ]
    return Report(
        model=model.id if artifact.bound else "a model that nobody has named",
        recipe=artifact.recipe.name,
        identity=describe_identity(artifact),
        badges=describe_badges(artifact),
        sections=sections,
        version=artifact.manifest.versions.rotationzoo,
    )


def save_report(artifact: Artifact, report: Report) -> Artifact:
    """Add the page and the card's pictures to an artifact and its card. Raises `RotationZooError`
    if the disk refuses."""
    added = {REPORT: report.html().encode()}
    for figure in report.figures:
        if figure.name in _ON_CARD:
            added[_ON_CARD[figure.name]] = draw_png(figure.chart, figure.title)
    return add_files(artifact, added, {})


def write_pictures(report: Report, folder: Path, kind: str) -> list[Path]:
    """Write every picture of a report to a folder, as `png` or `svg` files that are named for what
    they show. Raises `RotationZooError` if the disk refuses."""
    draw = {"png": draw_png, "svg": draw_svg}[kind]
    with files.disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        paths = []
        for figure in report.figures:
            paths.append(folder / f"{figure.name}.{kind}")
            files.replace(paths[-1], draw(figure.chart, figure.title))
    return paths
