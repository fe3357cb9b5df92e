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
        self._told, self._steps, self._left = 0.0, 0, 0
        """When the stage was told last, the steps done since it began, and those left then."""

    def tell(self, stage: str, done: int, total: int) -> None:
        """Take note of a step. A `total` of 0 is not known."""
        now = self._clock()
        if stage != self._stage:
            self._stage, self._begun, self._first = stage, now, done
        self._told, self._steps = now, done - self._first
        self._left = total - done if total else 0

    def words(self) -> str:
        """The time left, as `0:02:30 left`; empty if it is not known yet, and where the last step
        takes longer than those before it."""
        if self._steps <= 0:
            return ""
        now = self._clock()
        step = (self._told - self._begun) / self._steps
        left = self._left * step - (now - self._told)
        # A step that takes longer than those before it counts as if it ended now.
        overdue = (now - self._begun) / (self._steps + 1) * (self._left - 1)
        seconds = max(left, overdue)
        return f"{timedelta(seconds=int(seconds))} left" if seconds > 0 else ""
