"""The page: one file, which runs no script but its own and asks nobody for anything."""

import json
from dataclasses import replace

import pytest
from support.reports import Made, make_artifact, make_evaluation

from rotationzoo.artifact.store import Artifact
from rotationzoo.report.card import render_card
from rotationzoo.report.page import make_report

HOSTILE = "<script>document.title='taken'</script>\"'><img src=x onerror=alert(1)>"


@pytest.fixture
def file(tmp_path):
    """A page with hostile names of a model and of an arm."""
    made = Made(heads=1, model=HOSTILE, arm=HOSTILE)
    folder = make_artifact(tmp_path / "made", made, make_evaluation(made))
    path = tmp_path / "page.html"
    path.write_text(make_report(Artifact.open(folder)).html())
    return path


@pytest.mark.hostile("markup")
def test_names_are_shown_as_they_are_and_no_foreign_script_runs(file, browser):
    opened = browser.open_page(file)
    assert opened.locator("h1").inner_text().endswith(HOSTILE)
    assert opened.title().endswith(HOSTILE)
    assert opened.locator("img").count() == 0
    assert HOSTILE in opened.locator("table").last.or_(opened.locator("main")).first.inner_text()
    assert "script-src 'sha256-" in file.read_text()


@pytest.mark.hostile("markup")
def test_a_foreign_script_that_came_through_would_not_run(file, browser):
    file.write_text(file.read_text().replace("<h1>", "<script>document.title = 'x'</script><h1>"))
    assert browser.open_page(file).title().endswith(HOSTILE)
    assert "Content Security Policy" in str(browser.faults)
    browser.faults.clear()


@pytest.mark.hostile("markup")
@pytest.mark.parametrize("turn", ["\u202e", "\u2066"])
def test_no_name_turns_the_direction_of_writing(made, turn):
    """Neither on the page, whose chart is a drawing of its own, nor on the card."""
    artifact = Artifact.open(made)
    content = json.loads(json.dumps(artifact.content))
    content["model"]["id"] = f"demo{turn}gpj.exe"
    shown = replace(artifact, content=content)
    for text in (make_report(shown).html(), render_card(shown.manifest)):
        assert "demo\ufffdgpj.exe" in text
        assert turn not in text
