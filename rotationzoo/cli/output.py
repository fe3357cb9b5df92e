"""What a person or a script sees: data on stdout, everything else on stderr.

Everything printed for a person goes through `visible`: names and messages come from hubs, files and
other libraries, and a terminal obeys what it is sent.
"""

import json
import logging
import math
import shlex
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from typing import Any, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from rotationzoo.cli.stage_log import StageLog
from rotationzoo.errors import RotationZooError
from rotationzoo.network.tokens import redact

_LONGEST = 1000  # characters of an error: what a hub answers may have no end
_NARROWEST, _WIDEST = 80, 10_000  # columns that every terminal has, and none
_NAME = 16  # columns that a table leaves to names on a narrow terminal
_COMMAND = ": rotationzoo "
_answered: ContextVar[bool] = ContextVar("answered", default=False)
"""Whether this command has printed its JSON object."""


def visible(text: str) -> str:
    """The text as one line that a terminal only shows: what is not printable (escapes, bells, line
    ends, controls of the direction of writing, lone surrogates) becomes an escape such as
    `\\x1b`."""
    return "".join(
        character if character.isprintable() else _escape(character) for character in text
    )


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def say(*lines: str) -> None:
    """Lines for people on stdout; on a terminal, broken between words."""
    _print(lines, sys.stdout)


def show_lines(*lines: str) -> None:
    """Lines on stdout that are there to be copied, and so are never broken."""
    for line in lines:
        print(visible(line))


def fold_command(command: str) -> list[str]:
    """A long shell command with a flag a line, so that no terminal breaks it where it cannot be
    copied."""
    try:
        words = shlex.split(command)
    except ValueError:
        words = []
    if len(command) < _NARROWEST or shlex.join(words) != command:
        return [command]  # short, or no command: Python, a comment, the variables before one
    parts: list[list[str]] = [[]]
    for word in words:
        if word.startswith("--"):
            parts.append([])
        parts[-1].append(word)
    return " \\\n    ".join(map(shlex.join, parts)).splitlines()


def _print(lines: tuple[str, ...], stream: TextIO) -> None:
    for line in lines:
        print("\n".join(_wrap(visible(redact(line)), stream)), file=stream)


def _wrap(line: str, stream: TextIO) -> list[str]:
    """Lines no longer than a terminal is wide, broken between words; a command at the end has a
    line of its own."""
    if not stream.isatty() or len(line) <= (width := Console(file=stream).width):
        return [line]
    prose, colon, command = line.partition(_COMMAND)
    options: dict[str, Any] = {
        "subsequent_indent": "  ",
        "break_long_words": False,
        "break_on_hyphens": False,
    }
    wrapped = textwrap.wrap(prose + colon[:1], width, **options)
    return [*wrapped, f"  {colon[2:]}{command}"] if colon else wrapped


class Mode(Enum):
    HUMAN = "human"
    JSON = "json"
    QUIET = "quiet"


class Output:
    """One command's way out, in one of three modes."""

    def __init__(self, json: bool = False, quiet: bool = False):
        self.mode = Mode.JSON if json else Mode.QUIET if quiet else Mode.HUMAN

    def result(self, data: dict[str, Any], name: str, human: Callable[[], None]) -> None:
        """Print the one result: `data` as JSON, or its `name` alone (names: one a line), or what
        `human` prints."""
        if self.mode is Mode.JSON:
            _print_json(data)
        elif self.mode is Mode.QUIET:
            show_lines(*name.split("\n"))
        else:
            human()

    def note(self, text: str) -> None:
        """A remark for people; scripts that asked for JSON or for names get it on stderr as
        well."""
        _print((text,), sys.stderr)

    def notes(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.note(f"Note: {text}")

    @contextmanager
    def progress(self) -> Iterator[Callable[[str, int, int], None]]:
        """A `(stage, done, total)` callback that draws a bar on a terminal, and writes a line now
        and then elsewhere."""
        stderr = Console(stderr=True)
        if self.mode is Mode.QUIET:
            yield lambda stage, done, total: None
            return
        if not stderr.is_terminal:
            with StageLog(self.note).running() as log:
                yield log
            return
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=stderr, transient=True) as bar:
            tasks: dict[str, TaskID] = {}

            def update(stage: str, done: int, total: int) -> None:
                if stage not in tasks:
                    for task in tasks.values():
                        bar.remove_task(task)  # a new stage has a bar and a speed of its own
                    tasks.clear()
                    tasks[stage] = bar.add_task(visible(stage), total=total or None)
                bar.update(tasks[stage], completed=done)

            yield update


def table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """A table on stdout; every column but the first is right-aligned. On a terminal that is too
    narrow the first column is broken, and no cell is ever cut."""
    grid = Table(box=None, pad_edge=False)
    for number, column in enumerate(columns):
        first = number == 0
        grid.add_column(
            Text(visible(column)),
            justify="left" if first else "right",
            overflow="fold",
            no_wrap=not first,
        )
    for row in rows:
        grid.add_row(
            *(Text(visible(cell)) for cell in row)
        )  # not as markup: a folder may be called [bold]
    names = max(cell_len(visible(row[0])) for row in [columns, *rows])
    natural = Console(width=_WIDEST).measure(grid).maximum
    console = Console()
    least = natural - max(0, names - _NAME) if console.is_terminal else natural
    say(title)
    Console(width=max(console.width, least)).print(grid)


def report(error: RotationZooError, as_json: bool = False) -> None:
    """One `Error:` line and, where there is something to do, one `Hint:` line; no token is in
    either. As JSON also the command's one object, unless it has printed that already."""
    message = _shortened(str(error))
    if as_json and not _answered.get():
        _print_json({"error": redact(message), "hint": redact(error.hint) if error.hint else None})
    lines = (f"Error: {message}", *([f"Hint: {error.hint}"] if error.hint else []))
    _print(lines, sys.stderr)


def unexpected(error: BaseException) -> RotationZooError:
    """An error that nobody foresaw as one line: its type, and the first line of its message."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    name = type(error).__name__
    return RotationZooError(
        f"{name}: {first}" if first else name,
        hint="for the traceback, run again with ROTATIONZOO_DEBUG=1",
    )


def print_traceback(error: BaseException) -> None:
    """All of what led to an error, and no token."""
    for part in traceback.format_exception(error):
        _print(tuple(part.splitlines()), sys.stderr)


def begin() -> None:
    """Start a command: it has printed nothing yet, and what stdout cannot encode is escaped, as on
    stderr."""
    _answered.set(False)
    if reconfigure := getattr(sys.stdout, "reconfigure", None):
        reconfigure(errors="backslashreplace")


def _print_json(data: dict[str, Any]) -> None:
    _answered.set(True)
    print(json.dumps(_without_nan(data), indent=2, allow_nan=False))


def _without_nan(value: Any) -> Any:
    """JSON has no word for NaN and infinity: null."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


class _Visible(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return visible(redact(super().format(record)))


def hush_libraries() -> None:
    """Keep the libraries' own bars and warnings out of a command's output; bars stay for downloads
    on a terminal."""
    import huggingface_hub
    import transformers

    ours = logging.getLogger(
        "rotationzoo"
    )  # on this very stream: ModelScope's client gets another one
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Visible())
    ours.handlers, ours.propagate = [handler], False
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name in ("accelerate", "huggingface_hub", "datasets"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        huggingface_hub.utils.disable_progress_bars()
