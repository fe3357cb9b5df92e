"""The only module that prints: data on stdout, everything else on stderr.

Text for people goes through `visible`: names and messages come from hubs, files and other
libraries, and a terminal would obey their control characters.
"""

import json
import logging
import os
import re
import shlex
import sys
import textwrap
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from rotationzoo.errors import RotationZooError
from rotationzoo.network.tokens import redact
from rotationzoo.settings_base import Settings, flag
from rotationzoo.words import sentence, shortened

_LONGEST = 1000  # characters of an error message, which may quote a hub's long answer
_UNLIMITED = 10_000  # columns, for files and programs
_COMMAND = re.compile(": (?=rotationzoo |pip install )")
# A model's text is not limited to printable characters: many scripts need others to join letters.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_answered: ContextVar[bool] = ContextVar("answered", default=False)
"""Whether this command has printed its JSON object."""


@dataclass(frozen=True, kw_only=True)
class Output(Settings):
    """Prints the result and the notes of one command, for a person or for a program."""

    json: bool = flag("Print one JSON object and nothing else.")
    quiet: bool = flag("Only print the result, in short.", "--quiet", "-q")

    def result(self, data: dict[str, Any], name: str, human: Callable[[], None]) -> None:
        """Print `data` as JSON, `name` (one or more lines) if quiet, or what `human` prints."""
        if self.json:
            _print_json(data)
        elif self.quiet:
            show_lines(*name.split("\n"))
        else:
            human()

    def note(self, text: str, stream: TextIO | None = None) -> None:
        """Print a remark in every mode, on stderr or on `stream`, an earlier stderr."""
        _print((text,), stream or sys.stderr)

    def tell(self, text: str) -> None:
        """Print progress on stderr, unless quiet."""
        if not self.quiet:
            self.note(sentence(text))

    def suggest(self, *words: str) -> None:
        """Print the command to run next, as the last line; `words` follow `rotationzoo`."""
        if Path.cwd() in map(Path.resolve, map(Path, words)):  # the folder would be replaced
            words = tuple(word for word in words if word != "--save")
        if not (self.json or self.quiet):
            sys.stdout.flush()  # both streams may go to one file
            self.note(f"Next: {shlex.join(['rotationzoo', *words])}")

    def notes(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.note(f"Note: {text}")


def say(*lines: str) -> None:
    """Print lines for people on stdout. On a terminal, they are wrapped between words."""
    _print(lines, sys.stdout)


def show_lines(*lines: str) -> None:
    """Print lines to copy on stdout, never wrapped."""
    for line in lines:
        print(visible(line))


def write_text(text: str) -> None:
    """Print a piece of a model's text at once. On a terminal, control characters are escaped."""
    if sys.stdout.isatty():
        text = _CONTROL.sub(lambda control: _escape(control[0]), text)
    print(text, end="", flush=True)


def table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    apart: bool = False,
    folded: Collection[str] = (),
) -> None:
    """Print a table, after an empty line if `apart`. The first column and those in `folded` are
    left-aligned. On a narrow terminal, columns are folded, and no cell is cut off."""
    grid = Grid(box=None, pad_edge=False, show_edge=False)
    for heading in columns:
        is_text = heading == columns[0] or heading in folded
        justify: Literal["left", "right"] = "left" if is_text else "right"
        grid.add_column(Text(visible(heading)), justify=justify, overflow="fold")
    for row in rows:
        # Without `Text`, rich would read markup in names such as [bold].
        grid.add_row(*(Text(visible(cell)) for cell in row))
    console = Console()
    say(*[""] * apart, title)
    Console(width=console.width if console.is_terminal else _UNLIMITED).print(grid)


def show_error(error: RotationZooError, as_json: bool = False) -> None:
    """Print an error and its hint, with tokens redacted; with `as_json` also as the command's JSON
    object, unless it has printed one."""
    message, hint = shortened(str(error), _LONGEST), error.hint or None
    if as_json and not _answered.get():
        with suppress(OSError):  # stderr gets it, too
            _print_json({"error": redact(message), "hint": hint and redact(hint)})
    _print([f"Error: {message}", *([f"Hint: {hint}"] if hint else [])], sys.stderr)


def print_traceback(error: BaseException) -> None:
    """Print the traceback of an error, with tokens redacted."""
    _print("".join(traceback.format_exception(error)).splitlines(), sys.stderr)


def start_output() -> None:
    """Start a command: no JSON object is printed yet, and stdout escapes what it cannot encode."""
    _answered.set(False)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the caller has closed it
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    if reconfigure := getattr(sys.stdout, "reconfigure", None):
        reconfigure(errors="backslashreplace")


def stderr_console() -> Console:
    """The console for progress bars, on this stderr: a hub's client may replace it later."""
    return Console(file=sys.stderr)


def visible(text: str) -> str:
    """The text as one line that is safe on a terminal: unprintable characters (control characters,
    line ends, bidi controls, lone surrogates) become escapes such as `\\x1b`."""
    return "".join(map(_escape, text))


def _escape(character: str) -> str:
    if character.isprintable():
        return character
    return character.encode("unicode_escape").decode("ascii")


def _print(lines: Iterable[str], stream: TextIO) -> None:
    for line in lines:
        print("\n".join(_wrap(visible(redact(line)), stream)), file=stream)


def _wrap(line: str, stream: TextIO) -> list[str]:
    """Wrap a line for a terminal. A command at its end gets a line to itself, unwrapped."""
    width = Console(file=stream).width
    if not stream.isatty() or len(line) <= width:  # files and programs get whole lines
        return [line]
    prose, *command = _COMMAND.split(line, maxsplit=1)
    wrapped = textwrap.wrap(
        prose + ":" * len(command),
        width,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return wrapped + [f"  {words}" for words in command]


def _print_json(data: dict[str, Any]) -> None:
    from pydantic_core import to_jsonable_python

    _answered.set(True)
    # JSON cannot express NaN and infinity, which become null.
    plain = to_jsonable_python(data, inf_nan_mode="null")
    print(json.dumps(plain, indent=2, allow_nan=False))


_LOUD = ("accelerate", "huggingface_hub", "bitsandbytes", "sigstore", "tuf", "vllm")


class _Visible(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return visible(redact(super().format(record)))


SHELL: dict[str, str] = {}
"""The environment before `hush_libraries`, for a server that replaces this process."""


def hush_libraries() -> None:
    """Silence other libraries, even those imported later, and send our warnings to stderr."""
    from huggingface_hub.utils import disable_progress_bars

    SHELL.clear()
    SHELL.update(os.environ)
    # Not the root logger: ModelScope's client adds a handler to it.
    handler, logger = logging.StreamHandler(sys.stderr), logging.getLogger("rotationzoo")
    handler.setFormatter(_Visible())
    logger.handlers, logger.propagate = [handler], False
    disable_progress_bars()
    for name in _LOUD:
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.setdefault("DATASETS_VERBOSITY", "critical")
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "VLLM_LOGGING_LEVEL": "CRITICAL"}
    if imported := sys.modules.get("transformers.utils.logging"):
        imported.set_verbosity_error()
        imported.disable_progress_bar()
