"""The bar of a job on a terminal."""

import re
from io import StringIO

import pytest
from rich.console import Console
from support.command_line import TITLE

from rotationzoo.cli import output
from rotationzoo.cli.progress_bar import show_progress
from rotationzoo.cli.time_left import TimeLeft


@pytest.mark.hostile("terminal")
def test_a_stage_of_a_job_is_no_markup_and_has_no_escapes(monkeypatch):
    screen = StringIO()
    console = Console(file=screen, force_terminal=True, width=80, color_system=None)
    monkeypatch.setattr(output, "Console", lambda **_: console)
    with show_progress(output.Output()) as progress:
        progress(f"fetching [bold]x{TITLE}", 1, 2)
    assert "fetching [bold]x\\x1b]0;owned\\x07" in screen.getvalue()
    assert "\x07" not in screen.getvalue()


def test_the_time_left_counts_every_step_of_the_stage():
    """Steps of a search take longer than the half minute that rich remembers."""
    now = [100.0]
    left = TimeLeft(lambda: now[0])

    def words_at(seconds: float, *step) -> str:
        now[0] = 100.0 + seconds
        if step:
            left.tell(*step)
        return left.words()

    assert words_at(0, "searching", 4, 24) == "", "of an earlier run"
    assert words_at(60, "searching", 5, 24) == "0:19:00 left"
    assert words_at(75) == "0:18:45 left"
    assert words_at(300, "searching", 6, 24) == "0:45:00 left"
    assert words_at(9000) == "14:10:00 left", "as if the seventh step ended now"
    words_at(9000, "searching", 23, 24)
    assert words_at(9400) == "0:01:13 left"
    assert words_at(9500) == "", "the last step takes longer than the others"
    assert words_at(9001, "testing", 0, 0) == words_at(9002, "testing", 0, 3) == ""
    assert words_at(9011, "testing", 1, 3) == "0:00:20 left"


def test_the_bar_shows_the_time_left_of_a_stage_that_learns_its_total(monkeypatch):
    screen = StringIO()
    console = Console(file=screen, force_terminal=True, width=80, color_system=None)
    monkeypatch.setattr(output, "Console", lambda **_: console)
    with show_progress(output.Output()) as progress:
        progress("loading the model", 0, 0)
        progress("choosing", 0, 0)
        progress("choosing", 0, 3)
        progress("choosing", 1, 3)
    assert re.search(r"choosing .* 1/3 0:00:00 left", screen.getvalue())
    assert "0/?" not in screen.getvalue()
