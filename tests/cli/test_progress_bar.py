"""The bar of a job on a terminal."""

import os
import pty
import re
import sys
import threading
from contextlib import suppress
from io import StringIO

import pytest
from rich.console import Console
from support.command_line import TITLE

from rotationzoo.cli import output
from rotationzoo.cli.progress_bar import Pace, show_progress
from rotationzoo.progress import Bytes, Tokens, in_tokens, silent


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
    pace = Pace(lambda: now[0])

    def words_at(seconds: float, *step) -> str:
        now[0] = 100.0 + seconds
        if step:
            pace.tell(*step)
        return pace.time_left()

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
    assert re.search(r"choosing .* 1/3, 0:00:00 left", screen.getvalue())
    assert "0/?" not in screen.getvalue()


def test_tokens_and_bytes_have_a_speed():
    now = [0.0]
    pace = Pace(lambda: now[0])
    pace.tell("calibrating", Tokens(4096), Tokens(32768))
    assert pace.words() == "4,096/32,768 tokens", "of an earlier run, whose time is not known"
    now[0] = 2.0
    pace.tell("calibrating", Tokens(12288), Tokens(32768))
    assert pace.words() == "12,288/32,768 tokens, 4,100 tokens/s, 0:00:05 left"
    now[0] = 3.0
    assert pace.words() == "12,288/32,768 tokens, 4,100 tokens/s, 0:00:04 left"
    now[0] = 4.0
    pace.tell("writing", Tokens(0), Tokens(64))
    now[0] = 14.0
    pace.tell("writing", Tokens(32), Tokens(64))
    assert pace.words() == "32/64 tokens, 3.2 tokens/s, 0:00:10 left"
    pace.tell("downloading", Bytes(0), Bytes(2_500_000_000))
    now[0] = 24.0
    pace.tell("downloading", Bytes(500_000_000), Bytes(2_500_000_000))
    assert pace.words() == "500 MB of 2.5 GB, 50 MB/s, 0:00:40 left"
    pace.tell("searching", 0, 72)
    now[0] = 34.0
    pace.tell("searching", 1, 72)
    assert pace.words() == "1/72, 0:11:50 left"


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
def test_a_terminal_shows_tokens_per_second_and_the_time_left(columns, monkeypatch):
    (main, side), hidden, sent = pty.openpty(), StringIO(), bytearray()

    def read() -> None:
        with suppress(OSError):  # which is how Linux says that the other side is closed
            while part := os.read(main, 65536):
                sent.extend(part)

    reader = threading.Thread(target=read)  # a terminal that nobody reads takes 4 kB
    reader.start()
    with os.fdopen(side, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        patch.setenv("COLUMNS", str(columns))
        patch.setenv("TERM", "xterm")
        now = [0.0]
        patch.setattr("rotationzoo.cli.progress_bar.Pace", lambda: Pace(lambda: now[0]))
        with show_progress(output.Output()) as progress:
            # What a hub's client prints is hidden, and the bar is not.
            patch.setattr(sys, "stderr", hidden)
            progress("answering with the exact cache", Tokens(0), Tokens(131072))
            now[0] = 3.0
            progress("answering with the exact cache", Tokens(12288), Tokens(131072))
        assert hidden.getvalue() == ""
    reader.join()
    os.close(main)
    shown = sent.decode()
    words = "12,288/131,072 tokens, 4,100 tokens/s, 0:00:29 left"
    assert words in re.sub(r"\x1b\[[\d;]*m", "", shown), shown
    assert "answering with" in shown
