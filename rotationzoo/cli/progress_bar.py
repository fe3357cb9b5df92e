"""The progress of a job: a bar on a terminal, lines in a log, nothing with `--quiet`."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Self

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Column
from rich.text import Text

from rotationzoo.cli.output import Output, stderr_console, visible, write_text
from rotationzoo.progress import Bytes, Progress, Tokens, repeating, silent

# Seconds. After 10 of silence, a job seems dead.
QUICK = 5.0  # a shorter job needs no log
EVERY = 9.0  # between two lines of one stage
_LOOK = 1.0  # between two checks of the clock
_PERIOD = 24 * 3600.0  # over which rich averages, because a step may take minutes


@contextmanager
def show_progress(out: Output) -> Iterator[Progress]:
    """Yield the progress callback for a job. It writes to stderr and removes its bar at the end."""
    bar = StageBar(stderr_console())
    if out.quiet:
        yield silent
    elif bar.console.is_terminal:
        with bar:
            yield bar.tell
    else:
        # Like the console, the log keeps this stderr.
        with log_stages(bar, partial(out.note, stream=sys.stderr)) as tell:
            yield tell


class StageBar(Bar):
    """A bar for the current stage of a job. `clock` returns seconds."""

    def __init__(self, console: Console, clock: Callable[[], float] | None = None):
        # On a narrow terminal, the name of the stage is cut off, and the bar is short for it.
        name, whole = Column(overflow="ellipsis", no_wrap=True), Column(no_wrap=True)
        super().__init__(
            TextColumn("{task.description}", markup=False, table_column=name),
            BarColumn(12),
            _Steps(whole),
            TimeRemainingColumn(table_column=whole),
            console=console,
            transient=True,
            speed_estimate_period=_PERIOD,
            get_time=clock,
        )

    def tell(self, stage: str, done: int, total: int) -> None:
        """Show a step of a stage. A `total` of 0 is unknown."""
        stage = visible(stage)
        if not self.tasks or self.tasks[0].description != stage:
            # A new task for each stage, for its own speed.
            for task in self.task_ids:
                self.remove_task(task)
            self.add_task(stage, total=None, kind=int)
        # A stage may learn its total only once it runs.
        self.update(self.task_ids[0], completed=done, total=total or None, kind=type(total))


class _Steps(ProgressColumn):
    """The steps done, as `1,024/8,192 tokens, 512 tokens/s`; empty if nothing is counted."""

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text()
        kind, speed = task.fields["kind"], task.finished_speed or task.speed
        unit = " tokens" if kind is Tokens else ""
        write = decimal if kind is Bytes else "{:,}".format
        words = f"{write(int(task.completed))}/{write(int(task.total))}{unit}"
        if speed and kind in (Bytes, Tokens):
            words += f", {write(int(speed))}{unit}/s"
        return Text(words)


@contextmanager
def log_stages(bar: StageBar, say: Callable[[str], None]) -> Iterator[Progress]:
    """Yield a callback for which `say` writes few lines: none in the first `QUICK` seconds, then
    one when a stage begins, and one every `EVERY` seconds, even if the stage reports nothing."""
    begun, lock = bar.get_time(), threading.Lock()
    written: dict[str, float] = {}  # stage -> the time of its last line

    def look() -> None:
        with lock:
            now = bar.get_time()
            for task in bar.tasks:
                quiet = now - written.get(task.description, -EVERY)
                if now - begun >= QUICK and quiet >= EVERY:
                    written[task.description] = now
                    say(_line(task, now - begun))

    def tell(stage: str, done: int, total: int) -> None:
        bar.tell(stage, done, total)
        look()

    with repeating(look, _LOOK):
        yield tell


def _line(task: Task, seconds: float) -> str:
    words = f"[{timedelta(seconds=int(seconds))}] {task.description} {_Steps().render(task)}"
    left = task.time_remaining
    return f"{words.rstrip()}, {timedelta(seconds=int(left))} left" if left else words.rstrip()


class TextScreen:
    """Shows the progress of a job except while it writes text, which a bar would overwrite."""

    def __init__(self, out: Output):
        self._out, self._bar, self._line_is_open = out, ExitStack(), False
        self._tell: Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, failure: Any, trace: Any) -> None:
        self._bar.close()
        if not isinstance(failure, OSError):  # the reader of the text may be gone
            self._end_line()

    def progress(self, stage: str, done: int, total: int) -> None:
        """Show a step of a stage."""
        if self._tell is None:
            self._end_line()
            self._tell = self._bar.enter_context(show_progress(self._out))
        self._tell(stage, done, total)

    def write(self, text: str) -> None:
        """Show a piece of text."""
        self._bar.close()
        self._tell = None
        write_text(text)
        self._line_is_open = not text.endswith("\n")

    def _end_line(self) -> None:
        if self._line_is_open:
            write_text("\n")
            self._line_is_open = False
