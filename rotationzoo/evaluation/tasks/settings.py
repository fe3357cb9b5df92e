"""Which recall tasks an evaluation asks, at which lengths, and how many questions of each."""

from dataclasses import dataclass

from transformers import PretrainedConfig

from rotationzoo.errors import RotationZooError, UsageError
from rotationzoo.model.rope import longer_rows_hint, position_count
from rotationzoo.recall.prompts import TASKS
from rotationzoo.words import nearest

SHORTEST = 2
"""The fewest tokens of a prompt."""
_MOST_QUESTIONS = 100_000


@dataclass(frozen=True)
class TaskSettings:
    """The recall tasks of one evaluation, as the user chose them."""

    names: tuple[str, ...] = tuple(TASKS)
    """Names of recall tasks; empty for none."""
    lengths: tuple[int, ...] = ()
    """Tokens per prompt. If empty, the prompts are as long as the rows of the evaluated text."""
    questions: int = 16
    """Questions per task and length, rounded up to whole prompts."""

    def check(self) -> None:
        """Raise `UsageError` for a task that does not exist, or a number that is out of range."""
        if unknown := [name for name in self.names if name not in TASKS]:
            raise UsageError(
                f"there is no recall task {unknown[0]!r}{nearest(unknown[0], TASKS)}",
                hint=f"give some of {', '.join(TASKS)}, or all, or none",
            )
        if not 1 <= self.questions <= _MOST_QUESTIONS:
            raise UsageError(
                f"--questions must be at least 1 and at most {_MOST_QUESTIONS:,}",
                hint="leave out the tasks: none",
            )
        if any(length < SHORTEST for length in self.lengths):
            raise UsageError(
                f"--lengths must be at least {SHORTEST}", hint="write them as: --lengths 2048,8192"
            )

    def check_positions(self, config: PretrainedConfig) -> None:
        """Raise `RotationZooError` if prompts are longer than the model has positions."""
        positions = position_count(config)
        longest = max(self.lengths, default=0)
        if self.names and positions is not None and longest > positions:
            raise RotationZooError(
                f"prompts of {longest} tokens are longer than the {positions} positions of the "
                "model",
                hint=longer_rows_hint(config, longest, f"give --lengths of at most {positions}"),
            )
