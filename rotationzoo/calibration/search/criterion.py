"""The criterion of a search: answers first, predictions second.

An answer needs one token far back to be read exactly. Average divergence is carried by tokens that
need none, so a rotation can have the lowest divergence and answer worst.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch

from rotationzoo import ranks
from rotationzoo.calibration.checkpoint import Checkpoint
from rotationzoo.calibration.passes import Passes
from rotationzoo.calibration.search.answer_loss import AnswerLoss
from rotationzoo.calibration.search.model_divergence import ModelDivergence
from rotationzoo.linalg.paired import clearly_less
from rotationzoo.progress import Progress, silent
from rotationzoo.rotations import Rotations

_NOTICED = 0.02  # a relative difference of losses that counts
_NOTHING = 1e-3  # nats per token that change no answer


@dataclass(frozen=True)
class Score:
    """How one candidate did. Lower is better in all fields, which are float64."""

    loss: torch.Tensor
    """Nats per token of the answers that were lost, `[prompts]`; empty if the model can do no
    recall task."""
    lost: torch.Tensor
    """The share of the answers that was lost, `[prompts]`."""
    divergence: torch.Tensor
    """Divergence of the model's predictions in nats per token, `[texts]`."""

    def summary(self) -> dict[str, float]:
        """Means for the manifest."""
        means = {"divergence": self.divergence.mean().item()}
        if len(self.loss):
            means["answer_loss"] = self.loss.mean().item()
            means["answers_lost"] = self.lost.mean().item()
        return means


def is_better(score: Score, other: Score) -> bool:
    """Whether answers lose clearly less; or, if they lose the same, predictions do.

    Clearly is by more than one standard error of the paired difference.
    """
    if len(score.loss) and clearly_less(score.loss, other.loss):
        return True
    return _answers_as_well(score, other) and bool(clearly_less(score.divergence, other.divergence))


def find_best(scores: Sequence[Score]) -> int:
    """The number of the best score: of those that answer as well as the best answers, the one whose
    predictions diverge least."""
    numbers = list(range(len(scores)))
    if len(scores[0].loss):
        lead = min(scores, key=lambda score: score.loss.mean().item())
        numbers = [number for number in numbers if _answers_as_well(scores[number], lead)]
    return min(numbers, key=lambda number: scores[number].divergence.mean().item())


def _answers_as_well(score: Score, other: Score) -> bool:
    """Whether answers lose neither clearly nor noticeably more; True if there are none.

    A difference within the standard error is still the best guess there is. Predictions decide only
    where it is smaller than anyone would notice.
    """
    if not len(score.loss):
        return True
    noticed = (1 + _NOTICED) * other.loss.mean() + _NOTHING
    return not clearly_less(other.loss, score.loss) and bool(score.loss.mean() <= noticed)


class Criterion:
    """Measures rotations, each name once.

    - `answers`: None if the model can do no recall task.
    - `saved`: where measurements are kept; other criteria may share it under another `part`.
    - `passes`: counts the tokens that the model reads for predictions and for answers.
    """

    def __init__(
        self,
        answers: AnswerLoss | None,
        divergence: ModelDivergence,
        saved: "SavedScores | None" = None,
        part: str = "choosing",
        passes: Passes | None = None,
    ):
        self.answers, self.divergence = answers, divergence
        self._saved = SavedScores() if saved is None else saved
        self._part, self._passes = part, passes or Passes()

    def measure(
        self, candidates: Mapping[str, Rotations], progress: Progress = silent, stage: str = ""
    ) -> dict[str, Score]:
        """The score of each candidate, by its name. What is not measured yet is told as a `stage`,
        counted in texts and prompts."""
        scores = {name: self._saved.read(self._place(name)) for name in candidates}
        missing = [name for name, score in scores.items() if score is None]
        if missing:
            texts, prompts = len(self.divergence.measured_texts), self._prompts
            done, total = 0, len(missing) * (texts + prompts)

            def tell(rows: int) -> None:
                nonlocal done
                done += rows
                progress(stage, done, total)

            tell(0)
            # Measured together, because each call reads once with an exact cache the texts for
            # which there was no room to keep what the exact model made of them.
            with self._passes.of("predictions"):
                divergences = self.divergence.measure([candidates[name] for name in missing], tell)
            tell(len(missing) * texts - done)  # what other processes have measured
            for name, divergence in zip(missing, divergences, strict=True):
                score = Score(*self._ask(candidates[name]), divergence)
                tell(prompts)
                self._saved.add(self._place(name), score)
                scores[name] = score
            self._saved.save()
        return {name: score for name, score in scores.items() if score is not None}

    @property
    def _prompts(self) -> int:
        return 0 if self.answers is None else len(self.answers.prompts)

    def _ask(self, rotations: Rotations) -> tuple[torch.Tensor, torch.Tensor]:
        if self.answers is None:
            nothing = torch.empty(0, dtype=torch.float64)
            return nothing, nothing
        with self._passes.of("answers"):
            return self.answers.measure(rotations)

    def _place(self, name: str) -> str:
        return f"{self._part}: {name}"


class SavedScores:
    """Scores by name, kept in a checkpoint, so that a stopped search measures nothing twice."""

    def __init__(self, checkpoint: Checkpoint | None = None):
        self._checkpoint = checkpoint
        # All processes must know the same ones, or some would wait for others to measure.
        self._tensors = ranks.of_first({} if checkpoint is None else checkpoint.read_scores())

    def read(self, name: str) -> Score | None:
        """The score with this name, or None if it was not measured yet."""
        tensors = [self._tensors.get(f"{name}: {field.name}") for field in fields(Score)]
        present = [tensor for tensor in tensors if tensor is not None]
        return Score(*present) if len(present) == len(tensors) else None

    def add(self, name: str, score: Score) -> None:
        """Keep a score."""
        for field in fields(Score):
            self._tensors[f"{name}: {field.name}"] = getattr(score, field.name)

    def save(self) -> None:
        """Save all scores to the checkpoint."""
        if self._checkpoint is not None and ranks.rank() == 0:
            self._checkpoint.save_scores(self._tensors)
