"""Parts of an evaluation (`artifact.measured`): scores of recall tasks, and decisions."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Annotated, Final, Literal

from pydantic import ConfigDict, Field

from rotationzoo.storage.strict_json import Count, Strict

Errors = dict[str, float | None]
"""Figure -> its standard error; None if there is only one text or prompt."""
Outlook = Literal["better", "worse", "same", "open"]
"""How an arm compares with another: better, worse, the same within a margin, or not clear."""
ALL_ELSE: Final = "hadamard+transform"
"""The arm with a Hadamard matrix, and otherwise the same as the artifact."""
DataFree = Literal["identity", "hadamard", "hadamard+transform"]
"""The data-free rotations in decisions."""
Action = Literal["serve", "refuse", "ask", "nothing"]
"""Serve the artifact or not, ask more, or nothing: the exact model cannot do any task."""
FLOOR = 0.9
"""The share of the answers that must be kept by default."""


class Figures(Strict):
    """Figures under the keys of the JSON, where `from_` is `from`. They may be NaN in memory:
    readers and writers of JSON refuse it."""

    model_config = ConfigDict(
        alias_generator=lambda name: name.removesuffix("_"),
        validate_by_name=True,
        serialize_by_alias=True,
        allow_inf_nan=True,
    )


class Score(Figures):
    """The score on some questions: how many were `answered` (the greedy answer is exactly right),
    and the mean log probability of the whole right answer, in nats."""

    answered: Count
    questions: Annotated[int, Field(gt=0)]
    log_probability: float

    @property
    def share(self) -> float:
        """The share of the questions that were answered."""
        return self.answered / self.questions


class LengthScore(Score):
    """The score on the prompts of one length."""

    length: Count


class Recall(Score):
    """The score on one task, or on all, with the standard errors of both figures over prompts."""

    standard_error: Errors


class TaskRecall(Recall):
    """The score on one task. `correct`: 1 or 0 for each question, in the order of prompts."""

    correct: Annotated[str, Field(max_length=100_000)]
    by_length: Sequence[LengthScore]


class ExactLengthScore(LengthScore):
    """The exact model's score on the prompts of one length, and whether it can do the task."""

    can_do: bool


class ExactTaskRecall(TaskRecall):
    """The exact model's score on one task: on the lengths at which it can do the task, or on all if
    there is none. `by_length` has all. `prompts`: the number of questions of each prompt."""

    by_length: Sequence[ExactLengthScore]
    can_do: bool
    prompts: list[int]


def kept_share(exact: Mapping[str, ExactTaskRecall], arm: Mapping[str, TaskRecall]) -> float | None:
    """The share of the exact model's right answers that an arm also gives; None without any."""
    pairs: list[tuple[str, str]] = []
    for task in arm.keys() & exact.keys():
        able = [length for length in exact[task].by_length if length.can_do]
        right = _split(exact[task].correct, able)
        for length, given in _split(arm[task].correct, arm[task].by_length).items():
            pairs += zip(right.get(length, ""), given, strict=False)  # an arm may have fewer
    kept = [given == "1" for right, given in pairs if right == "1"]
    return sum(kept) / len(kept) if kept else None


def _split(correct: str, lengths: Sequence[LengthScore]) -> dict[int, str]:
    """Length of prompts -> digits of `correct`."""
    digits = iter(correct)
    return {each.length: "".join(islice(digits, each.questions)) for each in lengths}


def plain_name(arm: str) -> str:
    """The name of an arm's artifact."""
    return arm.removesuffix("+transform").removesuffix("+pooled")


class Rival(Figures):
    """The arm of a data-free rotation in as many bytes, compared with an artifact's arm. A positive
    `difference` of the shares of answered questions favors the artifact. `p_value`: of the
    sign-flip test over prompts, corrected for all rivals."""

    name: DataFree
    difference: float
    interval: list[float]
    p_value: float
    outlook: Outlook


class Decision(Figures):
    """What to do with an artifact, from the answers of one of its arms.

    * `kept`: the share of the exact model's right answers that the arm also gives, None if there
      are none; `interval`: its lower and upper bound, each one-sided at the `level`; `floor`: the
      share that must be kept;
    * `more_questions`: how many new questions of each task and length would settle it in 80 of 100
      evaluations; `more_seconds`: how long these take on the machine that measured;
    * `level`: the chance that this look ends in a wrong verdict, of 5 % in total;
    * `bits`: per element; `words`: what to do and why, the shares of each task, and other arms.
    """

    arm: str
    kept: float | None = None
    interval: Annotated[list[float], Field(min_length=2, max_length=2)] | None = None
    floor: float = FLOOR
    action: Action
    more_seconds: float | None = None
    more_questions: Count | None = None
    level: float
    bits: float | None = None
    rivals: list[Rival] = Field(default_factory=list)
    words: list[str]

    def __str__(self) -> str:
        return "\n".join(self.words)

    __repr__ = __str__
