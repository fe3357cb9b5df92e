"""The report on an artifact: one page to decide by. A page is one HTML file with its style and its
scripts inside."""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from rotationzoo.artifact.store import ANSWERS, REPORT, Artifact
from rotationzoo.report.arms import gather_arms
from rotationzoo.report.charts import draw_png
from rotationzoo.report.commands import model_title, name_in_commands
from rotationzoo.report.figures import Figure, Section
from rotationzoo.report.origin import (
    Badge,
    describe_identity,
    describe_making,
    describe_memory,
    describe_use,
    validation_badge,
)
from rotationzoo.report.results import ANSWERED, DECISION, describe_decision

_FOLDER = Path(__file__).parent
_UNMEASURED = (
    "Nothing has been measured of what these rotations keep and cost. To measure it and to see it "
    "here, run: rotationzoo evaluate {} ARTIFACT --save"
)


@dataclass(frozen=True)
class Report:
    """The content of a report on an artifact."""

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


def make_report(
    artifact: Artifact, others: Sequence[Artifact] = (), signature: Badge | None = None
) -> Report:
    """A report from what is stored in an artifact, with the arms of `others` next to its own where
    they were measured in the same way. No model is read. `signature`: what is known of it, which
    is a matter of the zoo.

    Raises `RotationZooError` for a damaged file.
    """
    arms = gather_arms(artifact, others)
    model = artifact.manifest.model
    decision = Section("decide", DECISION, [_UNMEASURED.format(name_in_commands(model))])
    format = None
    if arms is not None:
        format = arms.evaluation.format
        decision = describe_decision(arms)
    sections = [
        decision,
        describe_memory(artifact, format),
        describe_use(artifact),
        describe_making(artifact),
    ]
    badges = [validation_badge(artifact.manifest.metrics.validation)]
    if signature is not None:
        badges.insert(0, signature)
    return Report(
        model=model_title(model),
        recipe=artifact.recipe.name,
        identity=describe_identity(artifact),
        badges=badges,
        sections=sections,
        version=artifact.manifest.versions.rotationzoo,
    )


def files_of_report(report: Report) -> dict[str, bytes]:
    """The page and the card's picture, as files of an artifact."""
    added = {REPORT: report.html().encode()}
    for figure in report.figures:
        if figure.name == ANSWERED:
            added[ANSWERS] = draw_png(figure.chart, figure.title)
    return added


# ---- pages


def render_page(
    template: str,
    scripts: tuple[str, ...] = ("page.js",),
    folders: tuple[Path, ...] = (),
    **values: Any,
) -> str:
    """The HTML of a template in `report/templates`, or in one of the `folders`, which extends
    `base.html.jinja`.

    Every value is escaped, unless it is `Markup`. `scripts` are files of this package. The page's
    own policy allows a browser to run these and nothing else, and to load nothing at all, so a
    name that slipped through unescaped could still do nothing.
    """
    sources = [_read(name) for name in scripts]
    hashes = " ".join(map(_policy_hash, sources))
    return (
        _environment(*folders)
        .get_template(template)
        .render(
            style=Markup(_read("page.css")),
            scripts=[Markup(source) for source in sources],
            script_policy=Markup(hashes or "'none'"),
            **values,
        )
    )


@cache
def _environment(*folders: Path) -> Environment:
    return Environment(
        loader=FileSystemLoader([*folders, _FOLDER / "templates"]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


@cache
def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _policy_hash(script: str) -> str:
    """A script's hash, as a content security policy writes it."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
