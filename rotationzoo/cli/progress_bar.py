"""Showing the progress of a job: a bar on a terminal, lines in a log, nothing with `--quiet`."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TaskID
from rich.progress import Progress as Bar
from rich.table import Column
from rich.text import Text

from rotationzoo.cli.output import Mode, Output, stderr_console, visible
from rotationzoo.cli.pace import Pace
from rotationzoo.cli.progress_log import ProgressLog
from rotationzoo.progress import Progress, silent

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
