"""Every page: one file, which runs no script but its own and asks nobody for anything."""

import pytest
from markupsafe import Markup
from support.browser import scrolls_sideways, serious_findings

from rotationzoo.report import page

HOSTILE = "<script>document.title = 'taken'</script><img src=x onerror=alert(1)>"
CHART = """<svg width="120" height="40" role="group" aria-label="two values">
<g><path role="graphics-symbol img" aria-label="layer 0: 1.5" d="M0,0h50v30h-50Z"/></g>
<g><path role="graphics-symbol img" aria-label="layer 1: 2.5" d="M60,0h50v30h-50Z"/></g></svg>"""
TEMPLATE = """{% extends "base.html.jinja" %}
{% block title %}{{ name }}{% endblock %}
{% block header %}<h1>{{ name }}</h1>{% endblock %}
{% block main %}<figure><figcaption>Values</figcaption>{{ chart }}</figure>{% endblock %}"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A page with a hostile name and a chart of two marks."""
    templates = tmp_path / "templates"
    templates.mkdir()
    (templates / "test.html.jinja").write_text(TEMPLATE)
    environment = page._environment()
    folders = [*environment.loader.searchpath, str(templates)]
    monkeypatch.setattr(environment.loader, "searchpath", folders)
    path = tmp_path / "page.html"
    path.write_text(page.render_page("test.html.jinja", name=HOSTILE, chart=Markup(CHART)))
    return path


@pytest.mark.hostile("markup")
def test_names_are_escaped_and_no_foreign_script_runs(file, browser):
    opened = browser.open_page(file)
    assert opened.locator("h1").inner_text() == HOSTILE
    assert opened.title() == HOSTILE
    assert opened.locator("img").count() == 0
    assert "script-src 'sha256-" in file.read_text()


def test_a_foreign_script_that_came_through_would_not_run(file, browser):
    file.write_text(file.read_text().replace("Values", "<script>document.title = 'x'</script>"))
    opened = browser.open_page(file)
    assert opened.title() == HOSTILE
    assert "Content Security Policy" in str(browser.faults)
    browser.faults.clear()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_keys_and_the_pointer_show_the_values_of_marks(file, browser, scheme):
    opened = browser.open_page(file, width=390, scheme=scheme)
    value = opened.locator("#value")
    opened.locator("figure svg").focus()
    assert not value.is_visible()
    for key, label in (("ArrowRight", "0: 1.5"), ("ArrowRight", "1: 2.5"), ("Home", "0: 1.5")):
        opened.keyboard.press(key)
        assert value.inner_text() == f"layer {label}"
    opened.evaluate("""() => {
        document.body.style.minHeight = "3000px";
        scrollBy(0, 5);
        return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
    }""")
    assert value.is_visible(), "focus scrolls to marks below the window"
    opened.keyboard.press("Escape")
    assert not value.is_visible()
    opened.locator("figure svg path").nth(1).hover()
    assert value.inner_text() == "layer 1: 2.5"
    assert not scrolls_sideways(opened)
    assert not serious_findings(opened)


def test_what_leaves_the_page_is_noticed(file, browser):
    file.write_text(
        file.read_text().replace("default-src 'none'; ", "").replace("img-src data:; ", "")
    )
    file.write_text(file.read_text().replace("Values", '<img src="http://127.0.0.1:9/x" alt="">'))
    browser.open_page(file)
    assert "a request left the page: http://127.0.0.1:9/x" in browser.faults
    browser.faults.clear()
