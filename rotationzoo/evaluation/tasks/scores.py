"""The score of answers to recall questions: how many are right, and how probable the right ones
are; of the exact model and of every arm, task by task."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TypeVar

import torch

from rotationzoo.artifact.scores import (
    CellScore,
    DepthScore,
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

_DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
_DECIMALS = 6  # of the log probabilities that are kept for every question

Range = TypeVar("Range", tuple[int, int], tuple[float, float])
Reply = tuple[Series, Answers]
"""The prompts of one task and length, and the answers to all of their questions."""


@dataclass(frozen=True)
class Scorer:
    """Answers to questions, which it scores in groups. All tensors have one entry a question."""

    correct: torch.Tensor
    log_probability: torch.Tensor
    prompt: torch.Tensor
    """The number of the question's prompt, counted over all prompts."""
    length: torch.Tensor
    """Tokens of the prompts of its series."""
    distance: torch.Tensor
    depth: torch.Tensor

    @classmethod
    def of(cls, replies: Sequence[Reply]) -> "Scorer":
        """The answers to all questions of several series."""
        prompts = [(series.length, prompt) for series, _ in replies for prompt in series.prompts]
        rows = []
        for number, (length, prompt) in enumerate(prompts):
            for question in prompt.questions:
                rows.append((number, length, question.distance, prompt.depth(question)))
        *columns, depths = zip(*rows, strict=True)
        numbers, lengths, distances = map(torch.tensor, columns)
        depth = torch.tensor(depths, dtype=torch.float64)
        given = join_answers([answers for _, answers in replies])
        return cls(given.correct, given.log_probability, numbers, lengths, distances, depth)

    def score(self, among: torch.Tensor | None = None) -> Score:
        """The score of all questions, or of those `among` selects, `[questions]`."""
        selected = torch.ones_like(self.correct) if among is None else among
        return Score(
            answered=int(self.correct[selected].sum()),
            questions=int(selected.sum()),
            log_probability=self.log_probability[selected].mean().item(),
        )

    def recall(self) -> RecallDetails:
        """The score with its standard errors; by distance and by depth, and by both and length."""
        by_distance = []
        for (low, high), among in self._distances():
            by_distance.append(DistanceScore(from_=low, to=high, **dict(self.score(among))))
        by_depth = []
        for (begin, end), among in self._depths():
            by_depth.append(DepthScore(from_=begin, to=end, **dict(self.score(among))))
        return RecallDetails(
            **dict(self.score()),
            standard_error=self._standard_errors(),
            by_distance=by_distance,
            by_depth=by_depth,
            by_cell=list(self._score_cells()),
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

    def _distances(self) -> list[tuple[tuple[int, int], torch.Tensor]]:
        # From the power of two at or below the least distance to the one above the greatest.
        nearest, farthest = (int(end).bit_length() for end in self.distance.aminmax())
        ranges = Buckets.between(1 << (nearest - 1), 1 << farthest).ranges
        return _fill(ranges, self.distance)

    def _depths(self) -> list[tuple[tuple[float, float], torch.Tensor]]:
        return _fill(pairwise(_DEPTHS), self.depth)

    def _score_cells(self) -> Iterator[CellScore]:
        lengths = [(length, self.length == length) for length in self.length.unique().tolist()]
        for cell in product(lengths, self._distances(), self._depths()):
            (length, of_length), (distances, near), (depths, deep) = cell
            among = of_length & near & deep
            if among.any():
                places = {
                    "length": length,
                    "distance_from": distances[0],
                    "distance_to": distances[1],
                    "depth_from": depths[0],
                    "depth_to": depths[1],
                }
                yield CellScore(**places, **dict(self.score(among)))

    def _standard_errors(self) -> Errors:
        """Over prompts, because the questions of one prompt share its text."""
        questions = torch.bincount(self.prompt).double()
        errors = []
        for values in (self.correct.double(), self.log_probability):
            sums = torch.bincount(self.prompt, weights=values)
            errors.append(weighted_mean(sums / questions, questions)[1])
        return {"answered": errors[0], "log_probability": errors[1]}


def _fill(ranges: Iterable[Range], values: torch.Tensor) -> list[tuple[Range, torch.Tensor]]:
    """The ranges, without their ends, that hold any of the values, and which these are."""
    filled = [(ends, (values >= ends[0]) & (values < ends[1])) for ends in ranges]
    return [(ends, among) for ends, among in filled if among.any()]


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
