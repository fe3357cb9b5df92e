"""How far a stage of a job is, how fast it goes, and how long it will still take."""

import time
from collections.abc import Callable
from datetime import timedelta

from rotationzoo.progress import Bytes, Tokens


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
        """What is known of the stage, as `1,024/8,192 tokens, 512 tokens/s, 0:00:14 left`; empty
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
