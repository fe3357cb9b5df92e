"""The bar of a job on a terminal."""

import re
import sys
from functools import partial
from io import StringIO

import pytest
from rich.console import Console
from support.command_line import TITLE

from rotationzoo.cli import output
from rotationzoo.cli.progress_bar import StageBar, show_progress
from rotationzoo.progress import Bytes, Tokens, in_tokens, silent


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


def test_the_time_left_counts_every_step_of_the_stage():
    """Steps of a search take longer than the half minute that rich remembers."""
    now = [100.0]
    bar = StageBar(Console(file=StringIO()), lambda: now[0])
    left = []
    for seconds, *step in (
        (0, "searching", 4, 24),  # of an earlier run
        (60, "searching", 5, 24),
        (300, "searching", 6, 24),
        (9000, "searching", 23, 24),
        (9001, "testing", 0, 0),
        (9011, "testing", 1, 3),
        (9021, "testing", 2, 3),
    ):
        now[0] = 100.0 + seconds
        bar.tell(*step)
        left.append(bar.tasks[0].time_remaining)
    assert left == [None, 19 * 60, 18 * 150, 9000 // 19 + 1, None, None, 10]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Tokens, "12,000/32,000 tokens, 4,000 tokens/s"),
        (Bytes, "12.0 kB/32.0 kB, 4.0 kB/s"),
        (int, "12,000/32,000"),
    ],
)
def test_tokens_and_bytes_have_a_speed(kind, words):
    now, screen = [0.0], StringIO()
    console = Console(file=screen, force_terminal=True, width=120, color_system=None)
    with StageBar(console, lambda: now[0]) as bar:
        for seconds, done in enumerate((0, 4000, 8000, 12000)):
            now[0] = seconds
            bar.tell("calibrating", kind(done), kind(32000))
    assert f" {words} 0:00:05" in screen.getvalue()


def test_passes_are_told_as_their_tokens():
    told = []
    tell = in_tokens(lambda *step: told.append(step), [512, 512, 128])
    for done in range(4):
        tell("evaluating", done, 3)
    assert [done for _, done, _ in told] == [0, 512, 1024, 1152]
    assert {(stage, total) for stage, _, total in told} == {("evaluating", 1152)}
    assert all(isinstance(count, Tokens) for step in told for count in step[1:])
    in_tokens(silent, [])("evaluating", 0, 0)


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
