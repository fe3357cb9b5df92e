"""Progress for a log, where no bar can be drawn: a line for each stage, and now and then a line
that says how far it is."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rotationzoo.progress import Progress

QUICK = 10.0  # seconds; a job that is over sooner needs no log
EVERY = 30.0  # seconds between two lines of one stage
_LOOK = 1.0  # seconds between two looks at the clock


class ProgressLog:
    """Takes `(stage, done, total)` as often as it comes, and writes little.

    Nothing in the first seconds; then a line when a stage begins, and at most one in 30 seconds
    while it lasts, whether it is counted (`total` above 0) or not. `say` writes a line, `clock`
    counts seconds.
    """

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic):
        self._say, self._clock = say, clock
        self._begun = clock()
        self._latest: tuple[str, int, int] | None = None
        self._written: tuple[str, float] | None = None
        """The stage of the last line, and when that was written."""
        self._lock = threading.Lock()

    def update(self, stage: str, done: int, total: int) -> None:
        self._latest = stage, done, total
        self.look()

    def look(self) -> None:
        """Write how far the job is, if it is time to."""
        with self._lock:  # `update` and the thread of `running` may look at once
            now = self._clock()
            if self._latest is None or now - self._begun < QUICK:
                return
            stage, done, total = self._latest
            if self._written is not None:
                last_stage, last_time = self._written
                if last_stage == stage and now - last_time < EVERY:
                    return
            self._written = stage, now
        counted = f" {done:,}/{total:,}" if total else ""
        self._say(f"[{timedelta(seconds=int(now - self._begun))}] {stage}{counted}")

    @contextmanager
    def running(self) -> Iterator[Progress]:
        """`update`, with a thread beside it that also looks at the clock while a stage that lasts
        reports nothing, such as a download."""
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
