"""The report page: the verdict, its chart and the commands first, from stored figures alone."""

import json
import shlex
import sys
from pathlib import Path

import pytest
import typer
from support.browser import HEIGHT, scrolls_sideways, serious_findings
from support.reports import ONE, Made, make_artifact, make_evaluation

from rotationzoo.artifact.store import Artifact
from rotationzoo.checks.verify import verify
from rotationzoo.cli.app import app
from rotationzoo.report import charts
from rotationzoo.report.card import reproduce_command
from rotationzoo.report.page import make_report

LABELS = "made", "no rotation", "Hadamard, one by one", "random, one by one", "KIVI"
LIMIT = 1 << 20  # bytes; 40,000 were measured


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = Made(layers=range(4))
    return make_artifact(tmp_path_factory.mktemp("report") / "made", made, make_evaluation(made))


@pytest.fixture(scope="module")
def page(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(make_report(Artifact.open(folder)).html())
    return path


def report_of(folder: Path, evaluation: dict, made: Made = ONE):
    """The report of an artifact with this evaluation."""
    return make_report(Artifact.open(make_artifact(folder, made, evaluation)))


def points_of(report) -> list[dict]:
    """What the chart of a report draws."""
    return report.verdict.figure.chart["data"]["values"]


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1440, "light")])
def test_the_first_screen_holds_what_to_do_why_and_how(page, browser, width, scheme):
    opened = browser.open_page(page, width, scheme)
    screen = 2 * HEIGHT if width == 390 else HEIGHT
    verdict = opened.locator("#verdict")
    assert verdict.bounding_box()["y"] + verdict.bounding_box()["height"] < screen
    words = verdict.inner_text()
    saved = "the cache takes 10.6 MB in place of 67.1 MB: 6.3 times smaller."
    for shown in ("Serve it: made keeps 69%", saved, "rotationzoo serve demo"):
        assert shown in words
    assert opened.locator("h2").evaluate_all("all => all.map(one => one.textContent)") == [
        "Verdict", "How it was measured, in numbers", "What it is", "How it was made",
    ]  # fmt: skip
    assert opened.locator("table:visible").count() == 0
    assert opened.locator(".badges").count() == 0, "what it lacks is no badge"
    assert not scrolls_sideways(opened)
    assert not serious_findings(opened)
    for part in opened.locator("summary").all():
        part.click()
    assert "has not been run" in opened.locator("#identity").inner_text()
    assert not scrolls_sideways(opened)
    assert not serious_findings(opened)
    assert page.stat().st_size < LIMIT


def test_tables_have_the_numbers_of_the_evaluation(page, folder, browser):
    opened = browser.open_page(page)
    evaluation = json.loads((folder / "evaluation.json").read_text())
    arms = evaluation["windows"][0]["arms"]
    measured = opened.locator("#measured")
    measured.locator("summary").click()
    costs = measured.get_by_role("table", name="cost").locator("tr").all()[1:]
    for row, (name, arm) in zip(costs, arms.items(), strict=True):
        error = arm["standard_error"]["perplexity_increase"]
        words = f"{arm['perplexity_increase']:+.2%} \u00b1{error:.2%}"
        assert row.locator("td").first.inner_text() == words
        assert row.locator("th").inner_text() == name


def test_the_chart_has_every_arm_at_its_bytes_and_its_share(folder):
    report = make_report(Artifact.open(folder), context=8192)
    rows = {row["name"]: row for row in points_of(report)}
    evaluation = json.loads((folder / "evaluation.json").read_text())
    arms = evaluation["windows"][0]["arms"].values()
    assert rows.keys() == {"exact model", *LABELS}
    most = evaluation["exact"]["all_tasks"]["answered"]
    for label, arm in zip(LABELS, arms, strict=True):
        assert rows[label]["share"] == arm["all_tasks"]["answered"] / most
    # 4 layers, 2 heads, 16 channels, keys and values, 2 bytes, 8,192 tokens.
    assert rows["exact model"]["memory"] == pytest.approx(8192 * 512 / 1e6)
    stored = (2.53 * 131072 - 16 * 320) / (131072 - 320)
    bits = (stored * (8192 - 320) + 16 * 320) / 8192
    assert rows["made"]["memory"] == pytest.approx(8192 * 512 * bits / 16 / 1e6)
    assert [name for name, row in rows.items() if row["accent"]] == ["made"]
    assert rows["made"]["interval"] == [0.6, 0.8]
    assert rows["made"]["label"] == "made\n69%"
    assert "At 8,192 tokens in every layer, the cache takes" in " ".join(report.verdict.words)


def test_the_decision_is_on_the_arm_that_is_highlighted(tmp_path):
    evaluation, name = make_evaluation(), "made+transform"
    window = evaluation["windows"][0]
    window["arms"][name] = {**window["arms"]["made"], "name": name, "rounding": "transform"}
    window["verdict"]["decisions"][0]["arm"] = name
    points = points_of(report_of(tmp_path / "made", evaluation))
    assert [row["name"] for row in points if row["accent"]] == ["made"]


@pytest.mark.parametrize(
    ("action", "more", "commands"),
    [
        ("serve", None, ["serve", "generate"]),
        ("ask", 96, ["evaluate", "generate"]),
        ("ask", None, ["evaluate", "generate"]),
        ("refuse", None, ["calibrate"]),
        ("nothing", None, ["evaluate", "generate"]),
    ],
)
def test_the_commands_follow_the_decision_and_are_ones_that_are_taken(
    tmp_path, action, more, commands
):
    evaluation = make_evaluation()
    decision = evaluation["windows"][0]["verdict"]["decisions"][0]
    decision |= {"action": action, "more_questions": more}
    report = report_of(tmp_path / "made", evaluation)
    assert report.verdict.lead.startswith("Serve it: made")
    group = typer.main.get_command(app)
    lines = [shlex.split(line)[1:] for line in report.verdict.commands]
    assert [name for name, *_ in lines] == commands
    again = shlex.split(reproduce_command(report.artifact.manifest))[1:]
    for name, *words in [*lines, again]:
        group.commands[name].make_context(name, words)  # raises for what it does not take
    assert ("--questions 96 --seed 1" in report.verdict.commands[0]) == (more == 96)


def test_a_page_replaces_a_page_and_nothing_else(tmp_path, inside):
    folder = make_artifact(tmp_path / "made")
    words = "report", folder, "--output", "report.html"
    for _ in range(2):
        assert inside(*words).returncode == 0
    for content in (b"<!doctype html>mine", bytes(1 << 25)):
        (inside.folder / "report.html").write_bytes(content)
        assert inside(*words).returncode == 1
        assert (inside.folder / "report.html").read_bytes() == content
    (inside.folder / "report.html").write_text("mine")
    assert "report.html exists and is not a page that report wrote" in inside(*words).stderr


def test_the_page_goes_into_the_artifact_unless_that_is_signed(tmp_path, inside):
    folder = make_artifact(tmp_path / "made")
    assert inside("report", folder, "--quiet").stdout == f"{folder / 'report.html'}\n"
    assert verify(Artifact.open(folder)).ok
    signed = make_artifact(tmp_path / "signed")
    (signed / "model.sig").write_text("a signature")
    assert inside("report", signed, "--quiet").stdout == "report.html\n"
    assert (signed / "model.sig").exists()
    assert not (signed / "report.html").exists()


def test_pages_name_the_folder_unless_they_are_published(tmp_path, inside, monkeypatch):
    made = Made(model="someone/large")
    folder = make_artifact(tmp_path / "made", made, make_evaluation(made))
    page, drawn = tmp_path / "page.html", []
    draw = charts.draw_inline
    monkeypatch.setattr(charts, "draw_inline", lambda *chart: drawn.append(chart) or draw(*chart))
    result = inside("report", folder, "-o", page, "--save", "--json")
    assert json.loads(result.stdout)["report"] == str(page)
    assert len(drawn) == 1, "one drawing, on both pages"
    assert (folder / "answers.png").read_bytes().startswith(b"\x89PNG")
    assert "(answers.png)" in (folder / "README.md").read_text()
    assert verify(Artifact.open(folder)).ok
    published = make_report(Artifact.open(folder)).html()
    pages = [(page.read_text(), True), ((folder / "report.html").read_text(), True)]
    for text, named in (*pages, (published, False)):
        assert (str(folder) in text, "FOLDER is that of" in text) == (named, not named)
        assert "LONG.txt" in text


def test_without_the_extra_the_command_says_so_and_writes_the_tables(tmp_path, inside, monkeypatch):
    made = Made(model="someone/large")
    folder = make_artifact(tmp_path / "made", made, make_evaluation(made))
    assert inside("report", folder, "--save").returncode == 0
    assert "<figure" in (folder / "report.html").read_text()
    for module in ("altair", "vl_convert"):
        monkeypatch.setitem(sys.modules, module, None)
    push = inside("push", folder, "someone/zoo", "--dry-run")
    assert push.stderr.count("the chart was not drawn") == 1
    assert "report.html" in push.stdout
    assert "answers.png" not in push.stdout
    plain = make_artifact(tmp_path / "plain", made, make_evaluation(made))
    result = inside("report", plain, "--save")
    assert result.returncode == 0
    assert result.stderr.count("the extra `report` is missing") == 1
    page = (plain / "report.html").read_text()
    assert "<figure" not in page
    assert "<caption>cost</caption>" in page
    assert "answers.png" not in (plain / "README.md").read_text()
    assert not (plain / "answers.png").exists()
    assert verify(Artifact.open(plain)).ok
    unmeasured = make_artifact(tmp_path / "unmeasured")
    assert "not drawn" not in inside("report", unmeasured, "-o", "other.html").stderr


def test_without_answers_the_page_says_so_and_draws_nothing(tmp_path, inside):
    evaluation = make_evaluation()
    evaluation["exact"]["all_tasks"] = None
    window = evaluation["windows"][0]
    for arm in window["arms"].values():
        arm["all_tasks"] = None
    words = ["Undecided: the model itself can do none of the tasks.", "Ask less."]
    decision = window["verdict"]["decisions"][0]
    decision |= {"action": "nothing", "kept": None, "interval": None, "words": words}
    verdict = report_of(tmp_path / "made", evaluation).verdict
    assert (verdict.lead, verdict.words[0]) == (words[0], words[1])
    assert verdict.figure is None
    assert "--lengths 512 --save" in inside("report", tmp_path / "made").stderr


def test_the_page_says_what_was_not_in_two_bits_and_what_the_arms_are(tmp_path):
    made = Made(layers=[0, 5], arm="mine")
    evaluation = make_evaluation(made) | {
        "layers": [5], "notes": ["an engine needs the folded model"],
        "prefill_chunk": 512, "prefill_layout": "server",
    }  # fmt: skip
    window = evaluation["windows"][0]
    for name, changes in (
        ("mine, written better", {"rounding": "transform"}),
        ("mine, by layer", {"pooled": True}),
        ("of a later version", {"kind": "baseline", "artifact": None}),
    ):
        window["arms"][name] = {**window["arms"]["mine"], "name": name, **changes}
    evaluation["windows"].append({**window, "recent": 128})
    report = report_of(tmp_path / "made", evaluation, made)
    page = report.html()
    said = " ".join([*report.verdict.words, page[page.index('id="measured"') :]])
    for words in ("Also evaluated, and not shown: windows 64/128", "kivi is not a rotation",
                  "+transform: channels that do", "+pooled: one rotation per layer",
                  "An engine needs the folded model"):  # fmt: skip
        assert words in said
    assert "tokens are exact, prefilled in chunks of 512 tokens" in page
    labels = {row["name"]: row["memory"] for row in points_of(report)}
    mine = "rounded one by one"
    assert {mine, "mine, written better", "mine, by layer", "of a later version"} < labels.keys()
    # Half of the elements was in few bits: one of two layers.
    share = 0.5 * 2.53 / 16 + 0.5
    assert labels[mine] / labels["exact model"] == pytest.approx(share)
