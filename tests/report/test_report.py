"""The report page: every chart with its values, from stored figures alone, in a browser."""

import json
import shlex

import pytest
import typer
from support.browser import scrolls_sideways, serious_findings
from support.reports import (
    BASELINES,
    OF_ARTIFACT,
    Made,
    make_artifact,
    make_evaluation,
    store_evaluation,
)

from rotationzoo.artifact.measured import Measured
from rotationzoo.artifact.store import Artifact
from rotationzoo.checks.verify import verify
from rotationzoo.cli.app import app
from rotationzoo.report.arms import ShownArm, with_unique_labels
from rotationzoo.report.page import make_report
from rotationzoo.report.tables import length_table

LABELS = "this one: oscar", "no rotation", "Hadamard", "random rotation", "KIVI"
HOSTILE = "<script>document.title='taken'</script>\"'><img src=x onerror=alert(1)>"
LIMIT = 2 << 20  # bytes; 320,000 were measured
_SIZES = """all => all.map(one => [
    one.querySelectorAll("[role~=graphics-symbol][aria-label]").length,
    one.getBoundingClientRect().width])"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_artifact(tmp_path_factory.mktemp("report") / "made", Made())


@pytest.fixture(scope="module")
def page(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(make_report(Artifact.open(folder)).html())
    return path


def cells_of(opened, name: str) -> list[list[str]]:
    """The rows of the table behind a picture, its header first."""
    rows = opened.locator(f"#figure-{name} tr")
    return rows.evaluate_all("rows => rows.map(row => [...row.cells].map(c => c.textContent))")


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1440, "light")])
def test_every_chart_is_there_at_any_width_and_fits(page, browser, width, scheme):
    opened = browser.open_page(page, width, scheme)
    drawn = opened.locator("figure").evaluate_all("all => all.map(one => one.id)")
    assert drawn == ["figure-answers", "figure-perplexity", "figure-memory"]
    charts = opened.locator("figure svg").evaluate_all(_SIZES)
    assert len(charts) == len(drawn)
    assert all(marks and 0 < wide <= width for marks, wide in charts)
    assert not scrolls_sideways(opened)
    assert not serious_findings(opened)
    assert page.stat().st_size < LIMIT


def test_hashes_stay_inside_their_box(page, browser):
    """On a phone they break, and the table of files need not be scrolled to read them."""
    opened = browser.open_page(page, 390)
    box = opened.locator("section[aria-labelledby=made] .scroll")
    hashes = [text for text in box.locator("td").all_inner_texts() if len(text) == 64]
    assert len(hashes) >= 2
    assert box.evaluate("box => box.scrollWidth <= box.clientWidth")


def test_tables_have_the_numbers_of_the_evaluation(page, folder, browser):
    opened = browser.open_page(page)
    evaluation = json.loads((folder / "evaluation.json").read_text())
    arms = evaluation["windows"][0]["arms"]
    exact = evaluation["exact"]["all_tasks"]
    row = ["exact model", str(exact["answered"]), str(exact["questions"])]
    assert cells_of(opened, "answers")[1][:3] == row
    for label, arm, row in zip(LABELS, arms.values(), cells_of(opened, "answers")[2:], strict=True):
        assert row[:2] == [label, str(arm["all_tasks"]["answered"])]
    for number, (label, arm) in enumerate(zip(LABELS, arms.values(), strict=True)):
        row = cells_of(opened, "perplexity")[1 + number]
        error = arm["standard_error"]["perplexity_increase"]
        increase = f"{arm['perplexity_increase']:+.3%}"
        assert row == [label, f"{arm['perplexity']:.3f}", increase, f"{error:.3%}"]
    decide = opened.locator("section[aria-labelledby=decide]")
    lengths = decide.get_by_role("table", name="by context length").locator("tr")
    for row, arm in zip(lengths.all()[1:], arms.values(), strict=True):
        increases = [f"{bucket['perplexity_increase']:+.1%}" for bucket in arm["by_length"]]
        assert row.locator("td").all_inner_texts() == increases
    # 4 layers, 2 heads, 16 channels, keys and values, 2 bytes.
    assert cells_of(opened, "memory")[1][:2] == ["8,192", "512"]


def test_screen_readers_and_arrow_keys_go_through_the_values(page, browser):
    opened = browser.open_page(page, 390, "light")
    answers = opened.locator("#figure-answers").aria_snapshot()
    assert "exact model: 80 of 80" in answers
    opened.locator("#figure-answers svg").focus()
    for key, label in (
        ("Home", "exact model"),
        ("ArrowDown", LABELS[0]),
        ("ArrowDown", LABELS[1]),
        ("ArrowUp", LABELS[0]),
        ("End", LABELS[-1]),
    ):
        opened.keyboard.press(key)
        assert opened.locator("#value").inner_text().startswith(f"{label}: ")


@pytest.mark.hostile("markup")
def test_names_of_models_and_arms_are_shown_as_they_are(tmp_path, browser):
    made = Made(layers=[0], heads=1, model=HOSTILE, arm=HOSTILE)
    path = tmp_path / "page.html"
    path.write_text(make_report(Artifact.open(make_artifact(tmp_path / "made", made))).html())
    opened = browser.open_page(path)
    assert opened.locator("h1").inner_text().endswith(HOSTILE)
    assert opened.locator("img").count() == 0
    assert opened.title().endswith(HOSTILE)
    assert HOSTILE in opened.locator("table").last.or_(opened.locator("main")).first.inner_text()


def test_the_commands_on_the_page_are_ones_that_the_command_line_takes(folder):
    group = typer.main.get_command(app)
    sections = make_report(Artifact.open(folder)).sections
    commands = [command for section in sections for command in section.commands]
    assert len(commands) == 4  # none that pulls: nobody publishes rotations of the demo
    for line in commands:
        _, name, *words = shlex.split(line)
        group.commands[name].make_context(name, words)  # raises for what it does not take


def test_without_an_evaluation_the_page_says_what_adds_it(tmp_path, inside):
    folder = make_artifact(tmp_path / "made", Made(layers=[0]), evaluated=False)
    result = inside("report", folder, "-o", tmp_path / "page.html")
    assert result.returncode == 0
    assert f"{folder} --save" in result.stderr.partition("rotationzoo evaluate")[2]
    text = (tmp_path / "page.html").read_text()
    assert "rotationzoo evaluate demo ARTIFACT --save" in text
    assert 'id="figure-memory"' in text
    assert 'id="figure-answers"' not in text


def test_artifacts_stand_beside_each_other_where_they_were_measured_alike(tmp_path):
    artifact = Artifact.open(make_artifact(tmp_path / "a", Made(layers=[0])))
    published = Made(layers=[0], arm="b", recipe="oscar-v1")
    alike = Artifact.open(make_artifact(tmp_path / "b", published))
    apart = Artifact.open(make_artifact(tmp_path / "c", Made(layers=[0], fingerprint="9" * 64)))
    report = make_report(artifact, [alike, apart])
    decide = report.sections[0]
    answers = decide.figures[0]
    labels = [row[0] for row in answers.table.rows]
    assert labels == ["exact model", LABELS[0], "oscar-v1 (published)", *LABELS[1:]]
    assert decide.listed[-1] == (
        "c is not in the pictures: its evaluation differs from this one's in the text."
    )
    assert "oscar-v1 is no arm" in " ".join(make_report(artifact).sections[0].listed)


def test_the_page_and_a_picture_go_into_the_artifact(tmp_path, inside):
    folder = make_artifact(tmp_path / "made", Made(layers=[0, 5], heads=1))
    result = inside("report", folder, "-o", "page.html", "--save", "--json")
    assert result.returncode == 0
    assert json.loads(result.stdout)["report"] == "page.html"
    assert (folder / "answers.png").read_bytes().startswith(b"\x89PNG")
    assert "(answers.png)" in (folder / "README.md").read_text()
    assert verify(Artifact.open(folder)).ok
    assert (folder / "report.html").read_bytes() == (inside.folder / "page.html").read_bytes()


def test_evaluations_differ_in_whatever_changes_their_figures():
    made = Made(layers=[0])
    first = Measured.model_validate(make_evaluation(made))
    for keys, value, words in (
        (["rope_scaling"], "yarn:4", "RoPE scaling"),
        (["sides"], ["value"], "quantized part"),
        (["windows", 0, "recent"], 128, "windows"),
        (["exact", "all_tasks", "questions"], 40, "questions"),
        (["exact", "perplexity"], 3.51, "perplexity of the exact model"),
        (["exact", "perplexity"], 3.5001, ""),
    ):
        other = place = make_evaluation(made)
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value
        assert first.differs_from(Measured.model_validate(other)) == words


def test_the_page_says_what_was_not_in_two_bits_and_what_the_arms_are(tmp_path):
    made = Made(layers=[0, 5], arm="mine")
    folder = make_artifact(tmp_path / "made", made, evaluated=False)
    evaluation = make_evaluation(made) | {
        "sides": ["value"], "layers": [5], "notes": ["an engine needs the folded model"],
        "prefill_chunk": 512, "prefill_layout": "server",
    }  # fmt: skip
    window = evaluation["windows"][0]
    for name, changes in (
        ("mine, written better", {"rounding": "feedback"}),
        ("mine, by layer", {"pooled": True}),
        ("of a later version", {"kind": "baseline", "artifact": None}),
    ):
        window["arms"][name] = {**window["arms"]["mine"], "name": name, **changes}
    evaluation["windows"].append({**window, "recent": 128})
    store_evaluation(folder, evaluation)
    decide = make_report(Artifact.open(folder)).sections[0]
    said = " ".join(decide.listed)
    for words in ("Only values were in 2 bits", "Not all layers were in 2 bits: 0 stayed exact",
                  "Also evaluated, and not shown: windows 64/128", "kivi is no rotation",
                  "+feedback: the same rotations", "+pooled: one rotation per layer",
                  "An engine needs the folded model"):  # fmt: skip
        assert words in said
    assert "prefilled in chunks of 512 tokens" in decide.words[0]
    labels = [row[0] for row in decide.figures[0].table.rows]
    ours = ["this one: oscar", "+ error feedback", "+ one rotation per layer"]
    assert labels[:4] == ["exact model", *ours]
    assert labels[-1] == "of a later version"


def test_an_arm_without_some_lengths_leaves_the_others_in_their_columns():
    evaluation = make_evaluation(Made(layers=[0]))
    made = evaluation["windows"][0]["arms"]["made"]
    made["by_length"] = made["by_length"][1:]
    arms = Measured.model_validate(evaluation).window.arms
    table = length_table(arms)
    assert table.columns == ["arm", "from 512", "from 1,024", "from 2,048"]
    assert table.rows[0] == ["made", "-", "+2.0%", "+4.0%"]
    assert table.rows[1] == ["identity", "+2.0%", "+4.0%", "+8.0%"]


def test_no_two_arms_have_one_label():
    evaluation = Measured.model_validate(make_evaluation(Made(layers=[0])))
    arms = [ShownArm(label, evaluation.window.arms[name]) for name, label in (
        ("made", "x" * 40 + "1"), ("made", "x" * 40 + "2"), ("made", "Hadamard"),
        ("hadamard", "Hadamard"), ("made", "exact model"),
    )]  # fmt: skip
    labels = [arm.label for arm in with_unique_labels(arms)]
    cut = "x" * 31 + "…"
    assert labels == [cut, f"{cut} (2)", "Hadamard (2)", "Hadamard", "exact model (2)"]


@pytest.mark.hostile("malformed")
def test_a_damaged_evaluation_is_refused_in_one_sentence(tmp_path, inside):
    made = Made(layers=[0])
    folder = make_artifact(tmp_path / "made", made, evaluated=False)
    evaluation = make_evaluation(made)
    evaluation["windows"][0]["arms"][BASELINES[0]]["perplexity"] = "<b>"
    of_others = json.dumps(make_evaluation(made)).replace(OF_ARTIFACT, "0" * 64)
    for content in (evaluation, json.loads(of_others)):
        store_evaluation(folder, content)
        result = inside("report", folder)
        assert result.returncode == 1
        assert "evaluation.json is damaged" in result.stderr
    assert not (inside.folder / "report.html").exists()
