"""The bar of a job on a terminal, and what a run says of itself in a log: enough to see that it
lives, and where it is."""

import json
import re
import sys
import threading
from functools import partial
from io import StringIO

import pytest
from rich.console import Console
from support.command_line import TITLE, succeeded

from rotationzoo.cli import output, progress_bar
from rotationzoo.cli.progress_bar import StageBar, log_stages, show_progress
from rotationzoo.progress import Tokens


@pytest.mark.hostile("terminal")
def test_a_stage_of_a_job_is_no_markup_and_has_no_escapes(monkeypatch):
    screen = StringIO()
    console = Console(file=screen, force_terminal=True, width=80, color_system=None)
    monkeypatch.setattr(output, "Console", lambda **_: console)
    with show_progress(output.Output()) as progress:
        progress("loading the model", 0, 0)
        progress(f"fetching [bold]x{TITLE}", 1, 2)
    assert "fetching [bold]x\\x1b]0;owned\\x07" in screen.getvalue()
    assert "\x07" not in screen.getvalue()
    assert "0/?" not in screen.getvalue(), "of a stage that nobody counts"


@pytest.mark.parametrize("columns", [80, 140])
def test_a_terminal_shows_tokens_per_second_and_the_time_left(columns, terminal, monkeypatch):
    screen, hidden, now = terminal(columns), StringIO(), [0.0]
    monkeypatch.setattr(sys, "stderr", screen)
    bar = partial(StageBar, clock=lambda: now[0])
    monkeypatch.setattr("rotationzoo.cli.progress_bar.StageBar", bar)
    with show_progress(output.Output()) as progress:
        # What a hub's client prints is hidden, and the bar is not.
        monkeypatch.setattr(sys, "stderr", hidden)
        for seconds, done in enumerate((0, 4096, 8192, 12288)):
            now[0] = seconds
            progress("answering with the exact cache", Tokens(done), Tokens(131072))
    assert hidden.getvalue() == ""
    shown = re.sub(r"\x1b\[[\d;]*m", "", screen.getvalue())
    assert "12,288/131,072 tokens, 4,096 tokens/s 0:00:29" in shown
    assert "answering with" in shown


@pytest.fixture
def log():
    """A log with a clock that is set by hand: `log(seconds, stage, done, total)` gives the lines
    that this adds."""
    now, lines = [100.0], []
    bar = StageBar(Console(file=StringIO()), lambda: now[0])
    with log_stages(bar, lines.append) as tell:

        def at(seconds: float, *update) -> list[str]:
            before = len(lines)
            now[0] = 100.0 + seconds
            tell(*update)
            return lines[before:]

        yield at


def test_a_stage_has_a_line_and_then_one_in_ten_seconds(log):
    assert log(1, "loading the model", 0, 0) == []
    assert log(11, "calibrating", 1, 1200) == ["[0:00:11] calibrating 1/1,200"]
    assert log(12, "calibrating", 2, 1200) == []
    assert log(19.9, "calibrating", 10, 1200) == []
    assert log(20, "calibrating", 10, 1200) == ["[0:00:20] calibrating 10/1,200, 0:19:37 left"]
    # A new stage does not wait.
    assert log(25, "composing rotations", 0, 0) == ["[0:00:25] composing rotations"]
    assert log(46, "searching", 0, 72) == ["[0:00:46] searching 0/72"]
    assert log(54, "searching", 1, 72) == []
    assert log(3600, "searching", 71, 72) == ["[1:00:00] searching 71/72, 0:00:51 left"]
    assert log(3710, "calibrating", 90, 1200) == ["[1:01:50] calibrating 90/1,200"]
    assert log(3715, "searching", 72, 72) == ["[1:01:55] searching 72/72"]
    assert log(3716, "calibrating", 91, 1200) == [], "however often stages alternate"


def test_nobody_needs_to_call_for_that(monkeypatch):
    monkeypatch.setattr(progress_bar, "_LOOK", 0.01)
    monkeypatch.setattr(progress_bar, "QUICK", 0.0)
    monkeypatch.setattr(progress_bar, "EVERY", 0.05)
    lines, three = [], threading.Event()

    def say(line: str) -> None:
        lines.append(line)
        if len(lines) == 3:
            three.set()

    with log_stages(StageBar(Console(file=StringIO())), say) as tell:
        tell("fetching the weights", 0, 0)
        assert three.wait(30)
    assert set(lines) == {"[0:00:00] fetching the weights"}
    assert "progress" not in [thread.name for thread in threading.enumerate()]


def test_the_command_line_writes_it_to_a_log(inside, monkeypatch):
    """For a run that lasts: here every run counts as one at once."""
    monkeypatch.setattr(progress_bar, "QUICK", 0.0)
    words = ["calibrate", "demo", "--tokens", "512", "--length", "256"]
    *lines, following = succeeded(inside(*words)).stderr.splitlines()
    assert following.startswith("Next: ")
    stages = [re.fullmatch(r"\[\d+:\d\d:\d\d\] (.*?)( \d+/\d+.*)?", line)[1] for line in lines]
    assert stages[0] == "looking at the model"
    assert {"loading the model", "calibrating", "measuring what errors cost"} < set(stages)
    words += ["--recipe", "hadamard", "--output"]
    as_json = succeeded(inside(*words, "as-json", "--json"))
    assert as_json.stderr.startswith("[0:00:00] looking at the model\n")
    assert json.loads(as_json.stdout)["recipe"] == "hadamard"
    assert succeeded(inside(*words, "quiet", "--quiet")).stderr == ""
