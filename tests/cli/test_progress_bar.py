"""The bar of a job on a terminal."""

from io import StringIO

import pytest
from rich.console import Console
from support.command_line import TITLE

from rotationzoo.cli import output
from rotationzoo.cli.progress_bar import show_progress


@pytest.mark.hostile("terminal")
def test_a_stage_of_a_job_is_no_markup_and_has_no_escapes(monkeypatch):
    screen = StringIO()
    console = Console(file=screen, force_terminal=True, width=80, color_system=None)
    monkeypatch.setattr(output, "Console", lambda **_: console)
    with show_progress(output.Output()) as progress:
        progress(f"fetching [bold]x{TITLE}", 1, 2)
    assert "fetching [bold]x\\x1b]0;owned\\x07" in screen.getvalue()
    assert "\x07" not in screen.getvalue()
