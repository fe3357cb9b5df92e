"""What a person or a script sees: data on stdout, everything else on stderr."""

import json
import logging
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from rotationzoo.errors import RotationZooError
from rotationzoo.stage_log import StageLog
from rotationzoo.tokens import redact


class Mode(Enum):
    HUMAN = "human"
    JSON = "json"
    QUIET = "quiet"


class Output:
    """One command's way out, in one of three modes."""

    def __init__(self, json: bool = False, quiet: bool = False):
        self.mode = Mode.JSON if json else Mode.QUIET if quiet else Mode.HUMAN

    def result(self, data: dict[str, Any], name: str, human: Callable[[], None]) -> None:
        """Print the one result: `data` as JSON, or its `name` alone, or what `human` prints."""
        if self.mode is Mode.JSON:
            print(json.dumps(data, indent=2))
        elif self.mode is Mode.QUIET:
            print(name)
        else:
            human()

    def note(self, text: str) -> None:
        """A remark for people; scripts that asked for JSON or for names get it on stderr as well."""
        print(redact(text), file=sys.stderr)

    def notes(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.note(f"Note: {text}")

    @contextmanager
    def progress(self) -> Iterator[Callable[[str, int, int], None]]:
        """A `(stage, done, total)` callback that draws a bar on a terminal, and writes a line now and then elsewhere."""
        stderr = Console(stderr=True)
        if self.mode is Mode.QUIET:
            yield lambda stage, done, total: None
            return
        if not stderr.is_terminal:
            with StageLog(self.note).running() as log:
                yield log
            return
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with Progress(*columns, console=stderr, transient=True) as bar:
            tasks: dict[str, TaskID] = {}

            def update(stage: str, done: int, total: int) -> None:
                if stage not in tasks:
                    for task in tasks.values():
                        bar.remove_task(task)  # a new stage has a bar and a speed of its own
                    tasks.clear()
                    tasks[stage] = bar.add_task(stage, total=total or None)
                bar.update(tasks[stage], completed=done)

            yield update


def table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """A table on stdout; every column but the first is right-aligned."""
    grid = Table(title=Text(title), title_justify="left", box=None, pad_edge=False)
    for number, column in enumerate(columns):
        grid.add_column(column, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        grid.add_row(*map(Text, row))  # not as markup: a folder may be called [bold]
    Console().print(grid)


def report(error: RotationZooError) -> None:
    """One `Error:` line and, where there is something to do, one `Hint:` line; no token is in either."""
    print(f"Error: {redact(str(error))}", file=sys.stderr)
    if error.hint:
        print(f"Hint: {redact(error.hint)}", file=sys.stderr)


def print_traceback(error: BaseException) -> None:
    """All of what led to an error, and no token."""
    print(redact("".join(traceback.format_exception(error))), file=sys.stderr)


def hush_libraries() -> None:
    """Keep the libraries' own bars and warnings out of a command's output; bars stay for downloads on a terminal."""
    import huggingface_hub
    import transformers

    ours = logging.getLogger("rotationzoo")  # on this very stream: ModelScope's client gets another one
    ours.handlers, ours.propagate = [logging.StreamHandler(sys.stderr)], False
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name in ("accelerate", "huggingface_hub", "datasets"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        huggingface_hub.utils.disable_progress_bars()
