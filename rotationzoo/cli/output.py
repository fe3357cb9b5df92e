"""The one place that prints: data on stdout, everything else on stderr.

Whatever is printed for a person goes through `visible`: names and messages come from hubs, files
and other libraries, and a terminal obeys the control characters that it is sent.
"""

import json
import math
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from enum import Enum
from typing import Any, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rotationzoo.errors import RotationZooError
from rotationzoo.network.tokens import redact

_LONGEST = 1000  # characters of an error: the answer of a hub may have no end
_UNLIMITED = 10_000  # columns, to measure how wide a table would like to be
_NAME = 16  # columns that a table leaves to names on a narrow terminal
_COMMAND = ": rotationzoo "
_answered: ContextVar[bool] = ContextVar("answered", default=False)
"""Whether this command has printed its JSON object."""


class Mode(Enum):
    """Who reads: a person, or a program that wants one JSON object (`--json`) or names alone
    (`--quiet`)."""

    HUMAN = "human"
    JSON = "json"
    QUIET = "quiet"


class Output:
    """Prints what one command has to say, in one of three modes."""

    def __init__(self, json: bool = False, quiet: bool = False):
        self.mode = Mode.HUMAN
        if quiet:
            self.mode = Mode.QUIET
        if json:
            self.mode = Mode.JSON

    def result(self, data: dict[str, Any], name: str, human: Callable[[], None]) -> None:
        """Print the one result: `data` as JSON, or its `name` alone (several names: one a line), or
        what `human` prints."""
        if self.mode is Mode.JSON:
            _print_json(data)
        elif self.mode is Mode.QUIET:
            show_lines(*name.split("\n"))
        else:
            human()

    def note(self, text: str) -> None:
        """A remark for people, on stderr in every mode."""
        _print((text,), sys.stderr)

    def notes(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.note(f"Note: {text}")


def say(*lines: str) -> None:
    """Lines for people on stdout; a terminal gets them broken between words."""
    _print(lines, sys.stdout)


def show_lines(*lines: str) -> None:
    """Lines on stdout that are there to be copied, and so are never broken."""
    for line in lines:
        print(visible(line))


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
        cells = [Text(visible(cell)) for cell in row]  # no markup: a folder may be called [bold]
        grid.add_row(*cells)
    console = Console()
    least = Console(width=_UNLIMITED).measure(grid).maximum
    if console.is_terminal:
        longest_name = max(cell_len(visible(row[0])) for row in [columns, *rows])
        least -= max(0, longest_name - _NAME)
    say(title)
    Console(width=max(console.width, least)).print(grid)


def show_error(error: RotationZooError, as_json: bool = False) -> None:
    """One `Error:` line and, where there is something to do, one `Hint:` line; no token is in
    either. As JSON also the command's one object, unless it has printed that already."""
    message = _shortened(str(error))
    lines = [f"Error: {message}"]
    hint = None
    if error.hint:
        lines.append(f"Hint: {error.hint}")
        hint = redact(error.hint)
    if as_json and not _answered.get():
        _print_json({"error": redact(message), "hint": hint})
    _print(lines, sys.stderr)


def print_traceback(error: BaseException) -> None:
    """All of what led to an error, without tokens."""
    for part in traceback.format_exception(error):
        _print(part.splitlines(), sys.stderr)


def start_output() -> None:
    """Start a command: it has printed nothing yet, and what stdout cannot encode is escaped, as on
    stderr."""
    _answered.set(False)
    if reconfigure := getattr(sys.stdout, "reconfigure", None):
        reconfigure(errors="backslashreplace")


def stderr_console() -> Console:
    """The console of progress bars."""
    return Console(stderr=True)


def visible(text: str) -> str:
    """The text as one line that a terminal only shows: what is not printable (escapes, bells, line
    ends, changes of the direction of writing, lone surrogates) becomes an escape such as
    `\\x1b`."""
    return "".join(map(_escape, text))


def _escape(character: str) -> str:
    if character.isprintable():
        return character
    return character.encode("unicode_escape").decode("ascii")


def _print(lines: Iterable[str], stream: TextIO) -> None:
    for line in lines:
        print("\n".join(_wrap(visible(redact(line)), stream)), file=stream)


def _wrap(line: str, stream: TextIO) -> list[str]:
    """Lines no longer than a terminal is wide, broken between words; a command at the end has a
    line of its own, in one piece to be copied."""
    if not stream.isatty():
        return [line]
    width = Console(file=stream).width
    if len(line) <= width:
        return [line]
    prose, colon, command = line.partition(_COMMAND)
    wrapped = textwrap.wrap(
        prose + colon[:1],
        width,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    if colon:
        wrapped.append(f"  {colon[2:]}{command}")
    return wrapped


def _print_json(data: dict[str, Any]) -> None:
    _answered.set(True)
    print(json.dumps(_without_nan(data), indent=2, allow_nan=False))


def _without_nan(value: Any) -> Any:
    """NaN and infinity as null: JSON has no word for them."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
