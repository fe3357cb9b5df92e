"""Progress as lines in a log: one when a stage begins, and one from time to time while it lasts."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rotationzoo.cli.pace import Pace
from rotationzoo.progress import Progress

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
