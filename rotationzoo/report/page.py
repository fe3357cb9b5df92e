"""The report on an artifact: one page to decide by. A page is one HTML file with its style and its
scripts inside."""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from rotationzoo.artifact.store import ANSWERS, REPORT, Artifact
from rotationzoo.codec.size import CONTEXT
from rotationzoo.geometry import cached_layers
from rotationzoo.report.arms import gather_arms
from rotationzoo.report.charts import draw_png
from rotationzoo.report.commands import (
    FOLDER,
    asked_options,
    model_title,
    name_folder,
    use_commands,
)
from rotationzoo.report.figures import Section
from rotationzoo.report.memory import Request, describe_memory, stored_bits
from rotationzoo.report.origin import Badge, describe_identity, describe_making, validation_badge
from rotationzoo.report.results import VERDICT, describe_measurement, describe_verdict

_FOLDER = Path(__file__).parent
FOOTER = "Made from stored figures by rotationzoo"
"""What tells the page of a report from files that others wrote."""


@dataclass(frozen=True)
class Report:
    """The content of a report on an artifact: the section to decide by, and those that readers
    unfold."""

    model: str
    badges: list[Badge]
    verdict: Section
    folded: list[Section]
    version: str

    def html(self, folder: str = FOLDER) -> str:
        """The page, as one file, whose commands name the artifact's folder. The drawings are made
        once for all pages."""
        commands = [name_folder(command, folder) for command in self.verdict.commands]
        named = replace(self, verdict=replace(self.verdict, commands=commands))
        return render_page("report.html.jinja", ("page.js",), report=named, made=FOOTER)


def make_report(
    artifact: Artifact,
    others: Sequence[Artifact] = (),
    signature: Badge | None = None,
    context: int | None = None,
) -> Report:
    """A report from what is stored in an artifact, with the arms of `others` next to its own where
    they were measured in the same way. No model is read.

    - `signature`: what is known of it, which is a matter of the zoo;
    - `context`: tokens of the request whose memory is shown; by default the model's positions, if
      its evaluation knows them.

    Raises `RotationZooError` for a damaged file.
    """
    arms, measured = gather_arms(artifact, others), artifact.measured
    engine = measured.engine if measured else None
    context = context or (measured and measured.positions) or CONTEXT
    request = Request.measured_on(artifact, measured, context)
    validation = validation_badge(artifact.manifest.metrics.validation)
    badges = [badge for badge in (signature, validation) if badge is not None]
    folded = [describe_memory(artifact, measured, context), describe_identity(artifact, badges)]
    decision = None
    if arms is None:
        bits = stored_bits(artifact, None, context)
        words = ["Nothing shows yet what these rotations keep.", request.describe_saving(bits)]
        verdict = Section(anchor="verdict", title=VERDICT, lead="Measure them first.", words=words)
    else:
        layers = [layer.index for layer in cached_layers(artifact.geometry)]
        verdict, decision = describe_verdict(arms, request, layers), arms.decision
        folded.insert(0, describe_measurement(arms))
    asked = asked_options(measured) if measured else []
    commands = use_commands(artifact.manifest, decision, engine, asked)
    return Report(
        model=model_title(artifact.manifest.model),
        badges=[badge for badge in badges if badge.kind != "plain"],
        verdict=replace(verdict, commands=commands),
        folded=[*folded, describe_making(artifact)],
        version=artifact.manifest.versions.rotationzoo,
    )


def files_of_report(report: Report) -> dict[str, bytes]:
    """The page and the card's picture, as files of an artifact."""
    added = {REPORT: report.html().encode()}
    if figure := report.verdict.figure:
        added[ANSWERS] = draw_png(figure.chart, figure.title)
    return added


# ---- pages


def render_page(
    template: str,
    scripts: tuple[str, ...] = (),
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
