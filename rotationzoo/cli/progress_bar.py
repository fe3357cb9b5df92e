"""Showing the progress of a job: a bar on a terminal, lines in a log, nothing with `--quiet`."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TaskID, TextColumn
from rich.progress import Progress as Bar
from rich.text import Text

from rotationzoo.cli.output import Mode, Output, stderr_console, visible
from rotationzoo.cli.progress_log import ProgressLog
from rotationzoo.cli.time_left import TimeLeft
from rotationzoo.progress import Progress, silent


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
        with ProgressLog(out.note).running() as update:
            yield update


class _StepsColumn(ProgressColumn):
    """The steps done, of all; nothing for a stage whose steps are not counted."""

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text()
        return Text(f"{task.completed:,.0f}/{task.total:,.0f}")


class _TimeLeftColumn(ProgressColumn):
    """The time left of the stage. rich's own estimate forgets steps that took half a minute."""

    def __init__(self, time_left: TimeLeft):
        super().__init__()
        self._time_left = time_left

    def render(self, task: Task) -> Text:
        return Text(self._time_left.words())


@contextmanager
def _bar(console: Console) -> Iterator[Progress]:
    time_left = TimeLeft()
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        _StepsColumn(),
        _TimeLeftColumn(time_left),
    )
    with Bar(*columns, console=console, transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def update(stage: str, done: int, total: int) -> None:
            time_left.tell(stage, done, total)
            if stage not in tasks:
                # Start a new bar for each stage, because its speed is that of the stage alone.
                for task in tasks.values():
                    bar.remove_task(task)
                tasks.clear()
                tasks[stage] = bar.add_task(visible(stage), total=total or None)
            # A stage may learn its total only once it runs.
            bar.update(tasks[stage], completed=done, total=total or None)

        yield update
