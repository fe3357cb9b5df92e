"""The score of answers to recall questions: how many are right, and how probable the right ones
are."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TypedDict

import torch

from rotationzoo.evaluation.buckets import Buckets
from rotationzoo.evaluation.measures import Range
from rotationzoo.evaluation.tasks.prompts import Series
from rotationzoo.linalg.paired import weighted_mean
from rotationzoo.recall.answers import Answers

_DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
_DECIMALS = 6  # of the log probabilities that are kept for every question


# These types are the JSON of `evaluate`. Other programs rely on their keys.
class Score(TypedDict):
    """How some questions were answered."""

    answered: int
    """Questions whose greedy answer is exactly right."""
    questions: int
    log_probability: float
    """Of the whole right answer, in nats; the mean over questions."""


class ScoreErrors(TypedDict):
    """Standard errors over prompts of the share answered and of the mean log probability; None if
    there is only one prompt."""

    answered: float | None
    log_probability: float | None


class DistanceScore(Range, Score):
    """The questions whose statements lie so many tokens before their answers."""


Depths = TypedDict("Depths", {"from": float, "to": float})
"""A part of a prompt: 0 is its start, 1 its end."""


class DepthScore(Depths, Score):
    """The questions whose statements lie in this part of their prompts."""


class CellScore(Score):
    """The questions of prompts of one length, in one bucket of distances and one of depths."""

    length: int
    """Tokens of the prompts."""
    distance_from: int
    distance_to: int
    depth_from: float
    depth_to: float


class Summary(Score):
    """How the questions of one or several tasks were answered."""

    standard_error: ScoreErrors
    by_distance: list[DistanceScore]
    by_depth: list[DepthScore]
    by_cell: list[CellScore]
    """By length, distance and depth at once; only cells that have questions."""


class Records(TypedDict):
    """What was answered to each question, in the order of prompts."""

    correct: str
    """A digit for each question: 1 if it was answered."""
    log_probabilities: list[float]


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
        numbers, lengths, distances, depths = [], [], [], []
        for number, (length, prompt) in enumerate(prompts):
            numbers += [number] * len(prompt.questions)
            lengths += [length] * len(prompt.questions)
            distances += [question.distance for question in prompt.questions]
            depths += [prompt.depth(question) for question in prompt.questions]
        correct = torch.cat([answers.correct for _, answers in replies])
        return cls(
            correct,
            torch.cat([answers.log_probability for _, answers in replies]),
            torch.tensor(numbers),
            torch.tensor(lengths),
            torch.tensor(distances),
            torch.tensor(depths, dtype=torch.float64),
        )

    def score(self, among: torch.Tensor | None = None) -> Score:
        """The score of all questions, or of those `among` selects, `[questions]`."""
        selected = torch.ones_like(self.correct) if among is None else among
        return {
            "answered": int(self.correct[selected].sum()),
            "questions": int(selected.sum()),
            "log_probability": self.log_probability[selected].mean().item(),
        }

    def summarize(self) -> Summary:
        """The score with its standard errors; by distance and by depth, and by both and length."""
        by_distance: list[DistanceScore] = []
        for (low, high), among in self._distances():
            by_distance.append({"from": low, "to": high, **self.score(among)})
        by_depth: list[DepthScore] = []
        for (begin, end), among in self._depths():
            by_depth.append({"from": begin, "to": end, **self.score(among)})
        return {
            **self.score(),
            "standard_error": self._standard_errors(),
            "by_distance": by_distance,
            "by_depth": by_depth,
            "by_cell": self._score_cells(),
        }

    def records(self) -> Records:
        """What was answered to each question."""
        digits = map(str, self.correct.int().tolist())
        logs = [round(value, _DECIMALS) for value in self.log_probability.tolist()]
        return {"correct": "".join(digits), "log_probabilities": logs}

    def _distances(self) -> list[tuple[tuple[int, int], torch.Tensor]]:
        """The buckets of distances that have questions, and which these are, `[questions]`."""
        # From the power of two at or below the least distance to the one above the greatest.
        nearest, farthest = (int(end).bit_length() for end in self.distance.aminmax())
        ranges = Buckets.between(1 << (nearest - 1), 1 << farthest).ranges
        buckets = [(ends, _within(self.distance, *ends)) for ends in ranges]
        return [(ends, among) for ends, among in buckets if among.any()]

    def _depths(self) -> list[tuple[tuple[float, float], torch.Tensor]]:
        """The same by depth."""
        buckets = [(ends, _within(self.depth, *ends)) for ends in pairwise(_DEPTHS)]
        return [(ends, among) for ends, among in buckets if among.any()]

    def _score_cells(self) -> list[CellScore]:
        lengths = [(length, self.length == length) for length in self.length.unique().tolist()]
        cells: list[CellScore] = []
        for cell in product(lengths, self._distances(), self._depths()):
            (length, of_length), (distances, near), (depths, deep) = cell
            among = of_length & near & deep
            if among.any():
                cells.append(
                    {
                        "length": length,
                        "distance_from": distances[0],
                        "distance_to": distances[1],
                        "depth_from": depths[0],
                        "depth_to": depths[1],
                        **self.score(among),
                    }
                )
        return cells

    def _standard_errors(self) -> ScoreErrors:
        """Over prompts, because the questions of one prompt share its text."""
        questions = torch.bincount(self.prompt).double()
        errors = []
        for values in (self.correct.double(), self.log_probability):
            sums = torch.bincount(self.prompt, weights=values)
            errors.append(weighted_mean(sums / questions, questions)[1])
        return {"answered": errors[0], "log_probability": errors[1]}


def _within(values: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Which of the values lie from `low` up to, but not at, `high`."""
    return (values >= low) & (values < high)
