"""How well a model answers the questions of prompts: exact matches, and log probabilities."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from rotationzoo.model.loading import input_device
from rotationzoo.model.prediction import run_decoder
from rotationzoo.recall.prompts import Prompt


@dataclass(frozen=True)
class Answers:
    """A model's answers to all questions of some prompts, in their order."""

    correct: torch.Tensor
    """Boolean `[questions]`: whether the greedy answer is exactly right."""
    log_probability: torch.Tensor
    """Float64 `[questions]`: the log probability of the whole right answer, in nats."""

    def first(self, questions: int) -> "Answers":
        """The answers to the first questions alone."""
        return Answers(self.correct[:questions], self.log_probability[:questions])


@torch.no_grad()
def read_answers(model: PreTrainedModel, prompts: Sequence[Prompt]) -> Answers:
    """The model's answers to the questions of prompts of one length, which are one batch.

    One forward pass is enough: every token of the right answer is the most probable one after those
    before it if and only if greedy decoding writes exactly this answer. A later question follows
    the right answers of earlier ones.
    """
    correct, log_probability = [], []
    for prompt, first, logits in _predictions(model, prompts):
        for question in prompt.questions:
            target = prompt.ids[question.answer].to(logits.device)
            # Position t predicts the token at t + 1.
            at = slice(question.answer.start - 1 - first, question.answer.stop - 1 - first)
            predicted = logits[at].float()
            loss = torch.nn.functional.cross_entropy(predicted, target, reduction="sum")
            correct.append((predicted.argmax(-1) == target).all())
            log_probability.append(-loss.double())
    return Answers(torch.stack(correct).cpu(), torch.stack(log_probability).cpu())


def join_answers(parts: Sequence[Answers]) -> Answers:
    """The answers to consecutive prompts, from those to some of them each."""
    correct = torch.cat([part.correct for part in parts])
    return Answers(correct, torch.cat([part.log_probability for part in parts]))


def _predictions(
    model: PreTrainedModel, rows: Sequence[Prompt]
) -> Iterator[tuple[Prompt, int, torch.Tensor]]:
    """Each prompt with the position before its first answer, and the logits `[P, vocabulary]` from
    there on."""
    ids = torch.stack([prompt.ids for prompt in rows]).to(input_device(model))
    starts = [prompt.questions[0].answer.start - 1 for prompt in rows]
    states = run_decoder(model, ids)
    # Row by row, because a batch of short prompts would have more logits than a model has weights.
    for number, (prompt, start) in enumerate(zip(rows, starts, strict=True)):
        yield prompt, start, states.row(number).logits(slice(start, ids.shape[1]))[0]
