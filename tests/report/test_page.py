"""Every page: one file, which runs no script but its own and asks nobody for anything."""

import json
from dataclasses import replace

import pytest

from rotationzoo.artifact.store import Artifact
from rotationzoo.report import page
from rotationzoo.report.card import render_card
from rotationzoo.report.page import make_report

HOSTILE = "<script>document.title = 'taken'</script><img src=x onerror=alert(1)>"
TEMPLATE = """{% extends "base.html.jinja" %}
{% block title %}{{ name }}{% endblock %}
{% block header %}<h1>{{ name }}</h1>{% endblock %}
{% block main %}<p>Values</p><details><summary>More</summary>
<p id="inside">what is folded</p></details>{% endblock %}"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A page with a hostile name and a folded part."""
    templates = tmp_path / "templates"
    templates.mkdir()
    (templates / "test.html.jinja").write_text(TEMPLATE)
    environment = page.template_environment(is_html=True)
    folders = [*environment.loader.searchpath, str(templates)]
    monkeypatch.setattr(environment.loader, "searchpath", folders)
    path = tmp_path / "page.html"
    path.write_text(page.render_page("test.html.jinja", name=HOSTILE))
    return path


@pytest.mark.hostile("markup")
def test_names_are_escaped_and_no_foreign_script_runs(file, browser):
    opened = browser.open_page(file)
    assert opened.locator("h1").inner_text() == HOSTILE
    assert opened.title() == HOSTILE
    assert opened.locator("img").count() == 0
    assert "script-src 'sha256-" in file.read_text()


@pytest.mark.hostile("markup")
@pytest.mark.parametrize("turn", ["\u202e", "\u2066"])
def test_no_name_turns_the_direction_of_writing(made, turn):
    """Neither in the page, whose chart is a drawing of its own, nor in the card."""
    artifact = Artifact.open(made)
    content = json.loads(json.dumps(artifact.content))
    content["model"]["id"] = f"demo{turn}gpj.exe"
    shown = replace(artifact, content=content)
    for text in (make_report(shown).html(), render_card(shown.manifest)):
        assert "demo\ufffdgpj.exe" in text
        assert turn not in text


def test_a_foreign_script_that_came_through_would_not_run(file, browser):
    file.write_text(file.read_text().replace("Values", "<script>document.title = 'x'</script>"))
    opened = browser.open_page(file)
    assert opened.title() == HOSTILE
    assert "Content Security Policy" in str(browser.faults)
    browser.faults.clear()
