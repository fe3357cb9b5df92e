"""The score of answers to recall questions: how many are right, and how probable the right ones
are; of the exact model and of every arm, task by task."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rotationzoo.artifact.scores import (
    DistanceScore,
    Errors,
    ExactLengthScore,
    ExactTaskRecall,
    LengthScore,
    RecallDetails,
    Score,
    TaskRecall,
)
from rotationzoo.codec.layout import CacheLayout
from rotationzoo.evaluation.metrics import Buckets
from rotationzoo.evaluation.tasks.answering import ExactAnswers, TaskAnswers
from rotationzoo.evaluation.tasks.prompts import Series
from rotationzoo.linalg.paired import weighted_mean
from rotationzoo.recall.answers import Answers, join_answers

_DECIMALS = 6  # of the log probabilities that are kept for every question

Reply = tuple[Series, Answers]
"""The prompts of one task and length, and the answers to all of their questions."""


@dataclass(frozen=True)
class Scorer:
    """Answers to questions, which it scores in groups. All tensors have one entry a question."""

    correct: torch.Tensor
    log_probability: torch.Tensor
    prompt: torch.Tensor
    """The number of the question's prompt, counted over all prompts."""
    distance: torch.Tensor
    """Tokens from its statement to its answer."""

    @classmethod
    def of(cls, replies: Sequence[Reply]) -> "Scorer":
        """The answers to all questions of several series."""
        prompts = [prompt.questions for series, _ in replies for prompt in series.prompts]
        numbers, distances = list[int](), list[int]()
        for number, questions in enumerate(prompts):
            numbers += [number] * len(questions)
            distances += [question.distance for question in questions]
        given = join_answers([answers for _, answers in replies])
        places = torch.tensor(numbers), torch.tensor(distances)
        return cls(given.correct, given.log_probability, *places)

    def score(self, among: torch.Tensor | None = None) -> Score:
        """The score of all questions, or of those `among` selects, `[questions]`."""
        selected = torch.ones_like(self.correct) if among is None else among
        return Score(
            answered=int(self.correct[selected].sum()),
            questions=int(selected.sum()),
            log_probability=self.log_probability[selected].mean().item(),
        )

    def recall(self) -> RecallDetails:
        """The score with its standard errors, and by distance."""
        # From the power of two at or below the least distance to the one above the greatest.
        nearest, farthest = (int(end).bit_length() for end in self.distance.aminmax())
        by_distance = []
        for low, high in Buckets.between(1 << (nearest - 1), 1 << farthest).ranges:
            among = (self.distance >= low) & (self.distance < high)
            if among.any():
                by_distance.append(DistanceScore(from_=low, to=high, **dict(self.score(among))))
        return RecallDetails(
            **dict(self.score()),
            standard_error=self._standard_errors(),
            by_distance=by_distance,
        )

    def task_recall(self, by_length: Sequence[LengthScore]) -> TaskRecall:
        """The recall of one task, with the answer to each question."""
        digits = map(str, self.correct.int().tolist())
        return TaskRecall(
            **dict(self.recall()),
            correct="".join(digits),
            log_probabilities=[round(value, _DECIMALS) for value in self.log_probability.tolist()],
            by_length=by_length,
        )

    def _standard_errors(self) -> Errors:
        """Over prompts, because the questions of one prompt share its text."""
        questions = torch.bincount(self.prompt).double()
        errors = []
        for values in (self.correct.double(), self.log_probability):
            sums = torch.bincount(self.prompt, weights=values)
            errors.append(weighted_mean(sums / questions, questions)[1])
        return {"answered": errors[0], "log_probability": errors[1]}


def score_arm(
    answers: TaskAnswers, cache: CacheLayout, arm: str
) -> tuple[dict[str, TaskRecall], RecallDetails | None]:
    """The scores of an arm with one cache: of each task, and of all together."""
    asked = zip(answers.asked, answers.arms[cache, arm], strict=True)
    # Of arms that decide nothing, only the first questions.
    replies = [(exact.series.part(0, len(given.correct)), given) for exact, given in asked]
    tasks: dict[str, TaskRecall] = {}
    for task in dict.fromkeys(series.task for series, _ in replies):
        same = [reply for reply in replies if reply[0].task == task]
        lengths = [_score_length(reply) for reply in same]
        tasks[task] = Scorer.of(same).task_recall(lengths)
    return tasks, Scorer.of(replies).recall() if replies else None


def score_exact(answers: TaskAnswers) -> tuple[dict[str, ExactTaskRecall], RecallDetails | None]:
    """The scores of the exact model: of each task, and of all that it can do together."""
    tasks: dict[str, ExactTaskRecall] = {}
    for task in dict.fromkeys(exact.series.task for exact in answers.exact):
        tasks[task] = _score_task([exact for exact in answers.exact if exact.series.task == task])
    asked = [(exact.series, exact.answers) for exact in answers.asked]
    return tasks, Scorer.of(asked).recall() if asked else None


def _score_task(lengths: list[ExactAnswers]) -> ExactTaskRecall:
    """The exact model's answers to the prompts of one task, of one length after another."""
    done = [exact for exact in lengths if exact.can_do]
    replies = [(exact.series, exact.answers) for exact in done or lengths]
    questions = [prompt.questions for series, _ in replies for prompt in series.prompts]
    scorer = Scorer.of(replies)
    by_length = []
    for exact in lengths:
        score = dict(_score_length((exact.series, exact.answers)))
        blind = Scorer.of([(exact.series, exact.blind)]).score()
        by_length.append(ExactLengthScore(**score, can_do=exact.can_do, without_statements=blind))
    return ExactTaskRecall(
        **dict(scorer.task_recall(by_length)),
        can_do=bool(done),
        prompts=[len(asked) for asked in questions],
        distances=scorer.distance.tolist(),
    )


def _score_length(reply: Reply) -> LengthScore:
    return LengthScore(length=reply[0].length, **dict(Scorer.of([reply]).score()))
