"""Showing the progress of a job: a bar on a terminal, lines in a log, nothing with `--quiet`; with
the pace of a stage and the time that it will still take.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TaskID
from rich.progress import Progress as Bar
from rich.table import Column
from rich.text import Text

from rotationzoo.cli.output import Mode, Output, stderr_console, visible
from rotationzoo.progress import Bytes, Progress, Tokens, silent


class Pace:
    """Measures the stage that was told last. `clock` returns seconds.

    All steps of the stage so far count the same, because single steps may take minutes.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._stage, self._done, self._total = "", 0, 0
        self._begun, self._first = 0.0, 0
        """When the stage was first told, and how many steps were done then: a job that continues
        an earlier one begins with the steps of that one."""
        self._told, self._last = 0.0, 1
        """When the stage was told last, and how much was done in one go: all tokens of a batch."""

    def tell(self, stage: str, done: int, total: int) -> None:
        """Take note of a step. A `total` of 0 is not known."""
        now = self._clock()
        if stage != self._stage:
            self._stage, self._begun, self._first, self._last = stage, now, done, 1
        elif done > self._done:
            self._last = done - self._done
        self._told, self._done, self._total = now, done, total

    def words(self) -> str:
        """The state of the stage, as `1,024/8,192 tokens, 512 tokens/s, 0:00:14 left`; empty
        where nothing is counted."""
        parts = (self._steps(), self.speed(), self.time_left())
        return ", ".join(part for part in parts if part)

    def speed(self) -> str:
        """The tokens or bytes a second; empty for other steps, and where none was taken yet."""
        steps, seconds = self._done - self._first, self._told - self._begun
        if steps <= 0 or seconds <= 0:
            return ""
        if isinstance(self._total, Tokens):
            return f"{_rounded(steps / seconds)} tokens/s"
        if isinstance(self._total, Bytes):
            return f"{_decimal(steps / seconds)}/s"
        return ""

    def time_left(self) -> str:
        """The time left, as `0:02:30 left`; empty if it is not known yet, and where the last step
        takes longer than those before it."""
        steps, left = self._done - self._first, max(0, self._total - self._done)
        if steps <= 0:
            return ""
        now = self._clock()
        step = (self._told - self._begun) / steps
        seconds = left * step - (now - self._told)
        # A step that takes longer than those before it counts as if it ended now.
        overdue = (now - self._begun) / (steps + self._last) * (left - self._last)
        seconds = max(seconds, overdue)
        return f"{timedelta(seconds=int(seconds))} left" if seconds > 0 else ""

    def _steps(self) -> str:
        if not self._total:
            return ""
        if isinstance(self._total, Bytes):
            return f"{_decimal(self._done)} of {_decimal(self._total)}"
        unit = " tokens" if isinstance(self._total, Tokens) else ""
        return f"{self._done:,}/{self._total:,}{unit}"


def _rounded(number: float) -> str:
    """A number with three digits, because the others change with every step."""
    return f"{number:.2g}" if number < 10 else f"{float(f'{number:.3g}'):,.0f}"


def _decimal(count: float) -> str:
    """A number of bytes in a unit that leaves few digits."""
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


QUICK = 10.0  # seconds; a shorter job needs no log
EVERY = 30.0  # least number of seconds between two lines of one stage
_LOOK = 1.0  # seconds between two checks of the clock


class ProgressLog:
    """Accepts any number of updates `(stage, done, total)`, and writes few lines.

    It writes nothing in the first `QUICK` seconds. Then it writes a line when a stage begins, and
    at most one per `EVERY` seconds and stage, whether or not its steps are counted (`total` above
    0). The line of counted steps has the time left, and the tokens per second where steps are
    tokens. `say` writes a line; `clock` returns seconds.
    """

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic):
        self._say, self._clock = say, clock
        self._begun = clock()
        self._stage = ""
        self._written: dict[str, float] = {}
        """Stage -> the time at which its last line was written."""
        self._pace = Pace(clock)
        self._lock = threading.Lock()

    def update(self, stage: str, done: int, total: int) -> None:
        self._stage = stage
        self._pace.tell(stage, done, total)
        self.look()

    def look(self) -> None:
        """Write a line if one is due."""
        with self._lock:  # `update` and the thread of `running` may look simultaneously
            now = self._clock()
            stage = self._stage
            if not stage or now - self._begun < QUICK:
                return
            if now - self._written.get(stage, -EVERY) < EVERY:
                return
            self._written[stage] = now
            pace = self._pace.words()
        line = f"{stage} {pace}".rstrip()
        self._say(f"[{timedelta(seconds=int(now - self._begun))}] {line}")

    @contextmanager
    def running(self) -> Iterator[Progress]:
        """Yield `update`, while a thread writes lines for stages that report nothing themselves.

        A long download is one such stage.
        """
        stopped = threading.Event()

        def watch() -> None:
            while not stopped.wait(_LOOK):
                self.look()

        thread = threading.Thread(target=watch, name="progress-log", daemon=True)
        thread.start()
        try:
            yield self.update
        finally:
            stopped.set()
            thread.join()


_WIDE = 120  # columns of a terminal that has room for a long bar


@contextmanager
def show_progress(out: Output) -> Iterator[Progress]:
    """Yield the progress callback for a job. It writes to stderr and removes its bar at the end."""
    console = stderr_console()
    if out.mode is Mode.QUIET:
        yield silent
    elif console.is_terminal:
        with _bar(console) as update:
            yield update
    else:
        # As the console does, the log stays with the stderr of now.
        with ProgressLog(partial(out.note, stream=sys.stderr)).running() as update:
            yield update


class _StageColumn(ProgressColumn):
    """The name of the stage, cut off where the terminal is too narrow for what follows."""

    def render(self, task: Task) -> Text:
        return Text(task.description, no_wrap=True, overflow="ellipsis")


class _PaceColumn(ProgressColumn):
    """The steps done, the speed and the time left of the stage. rich's own estimate forgets steps
    that took half a minute."""

    def __init__(self, pace: Pace):
        super().__init__(Column(no_wrap=True))
        self._pace = pace

    def render(self, task: Task) -> Text:
        return Text(self._pace.words())


@contextmanager
def _bar(console: Console) -> Iterator[Progress]:
    pace = Pace()
    # On a narrow terminal the words need the room.
    width = 40 if console.width >= _WIDE else 10
    columns = _StageColumn(), BarColumn(width), _PaceColumn(pace)
    with Bar(*columns, console=console, transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def update(stage: str, done: int, total: int) -> None:
            pace.tell(stage, done, total)
            if stage not in tasks:
                # Start a new bar for each stage, because its speed is that of the stage alone.
                for task in tasks.values():
                    bar.remove_task(task)
                tasks.clear()
                tasks[stage] = bar.add_task(visible(stage), total=total or None)
            # A stage may learn its total only once it runs.
            bar.update(tasks[stage], completed=done, total=total or None)

        yield update
