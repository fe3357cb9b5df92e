"""Progress for a log, where no bar can be drawn: a line for each stage, and now and then how far it
is."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

QUICK = 10.0  # seconds; what is over sooner needs no log
EVERY = 30.0  # seconds between two lines of one stage
_LOOK = 1.0  # seconds between two looks at the clock


class StageLog:
    """Capabilities `(stage, done, total)` as often as it comes, and says little.

    Nothing in the first seconds; then a line when a stage begins, and at most one in 30 seconds
    while it lasts, counted (`total` above 0) or not. `clock` counts seconds.
    """

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic):
        self._say, self._clock = say, clock
        self._begun = clock()
        self._now: tuple[str, int, int] | None = None
        self._said: tuple[str, float] | None = None
        """The stage of the last line, and when that was."""
        self._lock = threading.Lock()

    def update(self, stage: str, done: int, total: int) -> None:
        self._now = stage, done, total
        self.look()

    def look(self) -> None:
        """Say how far the run is, if it is time to."""
        with self._lock:
            now = self._clock()
            if self._now is None or now - self._begun < QUICK:
                return
            stage, done, total = self._now
            if self._said is not None and self._said[0] == stage and now - self._said[1] < EVERY:
                return
            self._said = stage, now
        counted = f" {done:,}/{total:,}" if total else ""
        self._say(f"[{timedelta(seconds=int(now - self._begun))}] {stage}{counted}")

    @contextmanager
    def running(self) -> Iterator[Callable[[str, int, int], None]]:
        """`update`, with a thread beside it for stages that last and cannot be counted, such as a
        download."""
        done = threading.Event()

        def watch() -> None:
            while not done.wait(_LOOK):
                self.look()

        thread = threading.Thread(target=watch, name="stage-log", daemon=True)
        thread.start()
        try:
            yield self.update
        finally:
            done.set()
            thread.join()
