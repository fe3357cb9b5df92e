"""What a run says of itself in a log: enough to see that it lives, and where it is."""

import json
import re
import threading
from contextlib import redirect_stderr
from io import StringIO

import pytest
from rich.console import Console

from rotationzoo.cli import progress_bar
from rotationzoo.cli.output import Output
from rotationzoo.cli.progress_bar import StageBar, log_stages, show_progress
from rotationzoo.progress import Tokens


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


def test_what_is_over_at_once_says_nothing(log):
    assert log(0, "looking at the model", 0, 0) == []
    assert log(9.9, "calibrating", 64, 64) == []


def test_a_stage_has_a_line_and_then_one_in_thirty_seconds(log):
    assert log(1, "loading the model", 0, 0) == []
    assert log(11, "calibrating", 1, 1200) == ["[0:00:11] calibrating 1/1,200"]
    assert log(12, "calibrating", 2, 1200) == []
    assert log(40.9, "calibrating", 30, 1200) == []
    assert log(41, "calibrating", 31, 1200) == ["[0:00:41] calibrating 31/1,200, 0:19:29 left"]
    assert log(45, "composing rotations", 0, 0) == ["[0:00:45] composing rotations"], (
        "a new stage does not wait"
    )
    assert log(46, "searching", 0, 72) == ["[0:00:46] searching 0/72"]
    assert log(50, "searching", 1, 72) == []
    assert log(3600, "searching", 71, 72) == ["[1:00:00] searching 71/72, 0:00:51 left"]
    assert log(3710, "calibrating", 90, 1200) == ["[1:01:50] calibrating 90/1,200"]
    assert log(3715, "searching", 72, 72) == ["[1:01:55] searching 72/72"]
    assert log(3716, "calibrating", 91, 1200) == [], "however often stages alternate"


def test_a_stage_that_cannot_be_counted_is_heard_of_all_the_same(log):
    assert log(1, "fetching the weights", 0, 0) == []
    assert log(10, "fetching the weights", 0, 0) == ["[0:00:10] fetching the weights"]
    assert log(39, "fetching the weights", 0, 0) == []
    assert log(40, "fetching the weights", 0, 0) == ["[0:00:40] fetching the weights"]


def test_a_stage_of_text_has_tokens_per_second(log):
    total = Tokens(32000)
    assert log(11, "calibrating", Tokens(0), total) == ["[0:00:11] calibrating 0/32,000 tokens"]
    assert log(31, "calibrating", Tokens(8000), total) == []
    assert log(41, "calibrating", Tokens(12000), total) == [
        "[0:00:41] calibrating 12,000/32,000 tokens, 400 tokens/s, 0:00:50 left"
    ]


def test_the_log_is_not_hidden_with_what_a_client_prints(monkeypatch, capsys):
    monkeypatch.setattr(progress_bar, "QUICK", 0.0)
    with show_progress(Output()) as progress, redirect_stderr(StringIO()) as hidden:
        progress("sending 190 MB", 0, 0)
    assert hidden.getvalue() == ""
    assert "sending 190 MB" in capsys.readouterr().err


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
    assert not any(thread.name == "progress" for thread in threading.enumerate()), (
        "gone with its block"
    )


@pytest.mark.parametrize("flag", [None, "--json", "--quiet"])
def test_the_command_line_writes_it_to_a_log(flag, inside, monkeypatch):
    """For a run that lasts: here every run counts as one at once."""
    monkeypatch.setattr(progress_bar, "QUICK", 0.0)
    words = ["calibrate", "demo", "--tokens", "1024", "--length", "256", *([flag] if flag else [])]
    done = inside(*words)
    lines = done.stderr.splitlines()
    assert done.returncode == 0, lines
    if flag == "--json":
        assert json.loads(done.stdout)["tokens"] == 1024
    if flag == "--quiet":
        assert lines == []
        return
    if flag is None:
        assert lines.pop().startswith("Next: ")
    stages = [re.fullmatch(r"\[\d+:\d\d:\d\d\] (.*?)( \d+/\d+.*)?", line)[1] for line in lines]
    assert stages == [
        "looking at the model",
        "reading the text",
        "fetching the weights",
        "loading the model",
        "checking the capture",
        "calibrating",
        "composing rotations",
        "measuring what each layer loses",
    ]


def test_a_run_of_seconds_leaves_the_log_to_what_went_wrong(inside):
    assert inside("calibrate", "demo", "--tokens", "1000").stderr.startswith("Error: ")
