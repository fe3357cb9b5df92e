"""What a model's answers lose when it reads its cache through the codec."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from transformers import PreTrainedModel

from rotationzoo.cache.windows import Cache
from rotationzoo.calibration.search.model_divergence import simulate
from rotationzoo.model.geometry import Geometry
from rotationzoo.recall.answers import Answers, read_shared_answers
from rotationzoo.recall.prompts import Prompt
from rotationzoo.rotations import Rotations


@dataclass(frozen=True)
class AnswerLoss:
    """Measures rotations by a model's answers to the questions of prompts of one length.

    Only questions that the exact model answers right count, because no cache can lose the others.
    A prompt without any is skipped.
    """

    model: PreTrainedModel
    geometry: Geometry
    cache: Cache
    group_size: int | None
    prompts: Sequence[Prompt]
    batch: int = 1
    """Prompts per forward pass."""

    def measure(self, rotations: Rotations) -> tuple[torch.Tensor, torch.Tensor]:
        """For each prompt, the log probability per token that right answers lose, in nats, and the
        share of them that is lost: two tensors `[prompts]`, float64.

        Both are means over the questions of a prompt, whose answers fail together. A mean over log
        probabilities shows a blurred look-up long before the most probable token is another.
        Divided by its tokens, a long quotation counts no more than a number.
        """
        with simulate(rotations, self.geometry, self.cache, self.group_size).running(self.model):
            read = read_shared_answers(self.model, self.prompts, self.batch)
        loss = (self.exact.log_probability - read.log_probability) / self._tokens
        lost = (~read.correct).double()
        return self._mean_by_prompt(loss), self._mean_by_prompt(lost)

    @cached_property
    def exact(self) -> Answers:
        """The answers of the model that reads an exact cache."""
        return read_shared_answers(self.model, self.prompts, self.batch)

    @property
    def questions(self) -> int:
        """How many questions count."""
        return int(self.exact.correct.sum()) if self.prompts else 0

    @property
    def _tokens(self) -> torch.Tensor:
        """Tokens of each answer, `[questions]`."""
        lengths = [
            question.answer.stop - question.answer.start
            for prompt in self.prompts
            for question in prompt.questions
        ]
        return torch.tensor(lengths, dtype=torch.float64)

    def _mean_by_prompt(self, values: torch.Tensor) -> torch.Tensor:
        counts = [len(prompt.questions) for prompt in self.prompts]
        right = self.exact.correct.split(counts)
        counted = zip(values.split(counts), right, strict=True)
        return torch.stack([part[mask].mean() for part, mask in counted if mask.any()])
