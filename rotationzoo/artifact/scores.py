"""The answers in an evaluation: scores of recall tasks and decisions. `artifact.measured` puts them
together."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Annotated, Final, Literal

from pydantic import ConfigDict, Field

from rotationzoo.storage.strict_json import Count, Strict

Errors = dict[str, float | None]
"""Figure -> its standard error; None if there is only one text, or one prompt."""
Outlook = Literal["better", "worse", "same", "open"]
"""Whether an arm is shown to be better or worse than another, as good within a margin, or neither.
"""
ALL_ELSE: Final = "hadamard+transform"
"""The arm with a Hadamard matrix and all else as in the artifact."""
DataFree = Literal["identity", "hadamard", "hadamard+transform"]
"""The rotations without data that decisions compare."""
Action = Literal["serve", "refuse", "ask", "nothing"]
"""Serve the artifact, do not, ask more questions; or nothing was shown, because the exact model can
do no task."""


class Figures(Strict):
    """Figures under the keys of the JSON, where `from_` is `from`.

    A figure may be NaN until it is written: readers and writers of JSON refuse it.
    """

    model_config = ConfigDict(
        alias_generator=lambda name: name.removesuffix("_"),
        validate_by_name=True,
        serialize_by_alias=True,
        allow_inf_nan=True,
    )


# ---- answers to recall tasks


class Score(Figures):
    """How some questions were answered."""

    answered: Count
    """Questions whose greedy answer is exactly right."""
    questions: Annotated[int, Field(gt=0)]
    log_probability: float
    """Of the whole right answer, in nats; the mean over questions."""

    @property
    def share(self) -> float:
        """The share of the questions that was answered."""
        return self.answered / self.questions


class LengthScore(Score):
    """How the prompts of one length were answered."""

    length: Count


class Recall(Score):
    """How the questions of one task, or of all, were answered, with standard errors over prompts of
    the share and of the log probability."""

    standard_error: Errors


class TaskRecall(Recall):
    """How one task was answered, question by question in the order of prompts."""

    correct: Annotated[str, Field(max_length=100_000)]
    """A digit for each question: 1 if it was answered."""
    by_length: Sequence[LengthScore]


class ExactLengthScore(LengthScore):
    """How the exact model answered the prompts of one length, and whether it can do the task."""

    can_do: bool


class ExactTaskRecall(TaskRecall):
    """How the exact model answered one task, at the lengths at which it can do it, or at all
    lengths if it can do it at none."""

    by_length: Sequence[ExactLengthScore]
    """All lengths."""
    can_do: bool
    prompts: list[int]
    """The number of questions of each prompt."""


def kept_share(exact: Mapping[str, ExactTaskRecall], arm: Mapping[str, TaskRecall]) -> float | None:
    """The share of the exact model's right answers that an arm also gives, among the questions that
    both were asked; None if there are none."""
    pairs: list[tuple[str, str]] = []
    for task in arm.keys() & exact.keys():
        able = [length for length in exact[task].by_length if length.can_do]
        right = _split(exact[task].correct, able)
        for length, given in _split(arm[task].correct, arm[task].by_length).items():
            pairs += zip(right.get(length, ""), given, strict=False)  # an arm may be asked fewer
    kept = [given == "1" for right, given in pairs if right == "1"]
    return sum(kept) / len(kept) if kept else None


def _split(correct: str, lengths: Sequence[LengthScore]) -> dict[int, str]:
    """The digits of each length of prompts."""
    digits = iter(correct)
    return {each.length: "".join(islice(digits, each.questions)) for each in lengths}


# ---- decisions

FLOOR = 0.9
"""The share of the answers that must be kept by default."""


def plain_name(arm: str) -> str:
    """The name of the artifact whose arm this is."""
    return arm.removesuffix("+transform").removesuffix("+pooled")


class Rival(Figures):
    """A rotation in the same bytes that needs no data, compared with an artifact's arm. Positive
    differences favor the artifact."""

    name: DataFree
    """Of the arm."""
    difference: float
    """Of the shares of all questions that are answered."""
    interval: list[float]
    p_value: float
    """Of the sign-flip test over prompts, corrected for all rivals."""
    outlook: Outlook


class Decision(Figures):
    """What to do with an artifact, by the answers of one of its arms."""

    arm: str
    kept: float | None = None
    """The share of the exact model's right answers that the arm also gives; None if there are none.
    """
    interval: Annotated[list[float], Field(min_length=2, max_length=2)] | None = None
    """The lower and the upper bound of what is truly kept, each one-sided at the `level`."""
    floor: float = FLOOR
    """The share that was to be kept."""
    action: Action
    more_seconds: float | None = None
    """How long the new questions of `more_questions` take on the machine that measured."""
    more_questions: Count | None = None
    """New questions of each task and length that would settle it in 80 of 100 evaluations."""
    level: float
    """The chance that this look ends in a wrong verdict, of 5 % in all."""
    bits: float | None = None
    """Bits an element of the arm."""
    rivals: list[Rival] = Field(default_factory=list)
    words: list[str]
    """What to do and why, the shares of each task, and the other arms."""

    def __str__(self) -> str:
        return "\n".join(self.words)

    __repr__ = __str__
