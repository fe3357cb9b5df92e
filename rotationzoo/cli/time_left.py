"""How long a stage of a job will still take, from the steps that it has done."""

import time
from collections.abc import Callable
from datetime import timedelta


class TimeLeft:
    """Estimates the time left of the stage that was told last. `clock` returns seconds.

    All steps of the stage so far count the same, because single steps may take minutes.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._stage = ""
        self._begun, self._first = 0.0, 0
        """When the stage was first told, and how many steps were done then: a job that continues
        an earlier one begins with the steps of that one."""
        self._told, self._seconds = 0.0, -1.0
        """When the stage was told last, and the seconds left then; negative if not known."""

    def tell(self, stage: str, done: int, total: int) -> None:
        """Take note of a step. A `total` of 0 is not known."""
        now = self._clock()
        if stage != self._stage:
            self._stage, self._begun, self._first = stage, now, done
        self._told, self._seconds = now, -1.0
        if total and done > self._first:
            self._seconds = (now - self._begun) / (done - self._first) * (total - done)

    def words(self) -> str:
        """The time left, as `0:02:30 left`; empty if it is not known yet."""
        if self._seconds < 0:
            return ""
        left = max(0.0, self._seconds - (self._clock() - self._told))
        return f"{timedelta(seconds=int(left))} left"
