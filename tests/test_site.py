"""The site that Sphinx makes of docs/: no warning, no broken link, and pages that are current."""

import io
import re
from pathlib import Path
from warnings import catch_warnings, simplefilter

import pytest
import write_cli_reference
from support.places import ROOT

pytestmark = pytest.mark.thorough

DOCS = ROOT / "docs"
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
OUTSIDE = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
SOURCES = sorted(DOCS.rglob("*.md"))


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> tuple[Path, str]:
    """The built site and Sphinx's warnings. It is built in this process, which has torch already:
    autodoc imports the package."""
    from sphinx.application import Sphinx

    folder, warnings = tmp_path_factory.mktemp("site"), io.StringIO()
    app = Sphinx(DOCS, DOCS, folder / "html", folder / "trees", "html", None, None, warnings)
    assert app.config.nitpicky
    with catch_warnings():
        simplefilter("ignore")  # MyST uses what a later Sphinx removes
        app.build()
    return folder / "html", warnings.getvalue()


def test_the_site_builds_without_a_warning(site):
    folder, warnings = site
    assert not warnings
    built = {path.relative_to(folder).with_suffix("") for path in folder.rglob("*.html")}
    assert {path.relative_to(DOCS).with_suffix("") for path in SOURCES} <= built


def anchors(path: Path) -> set[str]:
    """What `#...` may follow a link to a Markdown file, as GitHub and MyST make it of headings."""
    text = FENCED.sub("", path.read_text("utf-8"))
    headings = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("path", [*OUTSIDE, *SOURCES], ids=lambda path: path.name)
def test_links_lead_somewhere_on_github(path):
    """Sphinx checks the pages among themselves; GitHub shows them beside the rest."""
    for target, anchor in LINK.findall(path.read_text("utf-8")):
        file = (path.parent / target).resolve() if target else path
        assert file.exists(), f"{target} does not exist"
        if anchor:
            assert anchor in anchors(file), f"{target} has no heading #{anchor}"


def test_the_reference_of_the_command_line_is_current():
    text = write_cli_reference.PAGE.read_text("utf-8")
    assert write_cli_reference.page(text) == text, "run: make docs"
