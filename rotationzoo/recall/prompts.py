"""Prompts of the recall tasks: token rows that hide statements in ordinary text and ask for them at
the end; and a model's answers: exact matches and log probabilities."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rotationzoo.errors import RotationZooError
from rotationzoo.model.loading import input_device
from rotationzoo.model.prediction import run_decoder
from rotationzoo.recall.questions import EXERCISES, POOLS, QUOTE, TASKS, Asked, Exercise
from rotationzoo.text.rows import start_tokens

_QUOTE_CUE, _QUOTED = 12, 16  # tokens of a passage that are given, and that are asked for
_QUOTE_LEAD = "# as above:\n"
_TRIES = 200  # to find a passage whose cue occurs only once


@dataclass(frozen=True)
class PromptSettings:
    """The prompts of one task."""

    task: str
    prompts: int
    length: int = 2048  # tokens per prompt
    questions: int | None = None  # per prompt; None takes the number in `TASKS`
    first: int = 64  # the first position at which a statement may begin, after the sink
    recent: int = 256  # tokens before the first question without a statement: they are read exact
    seed: int = 0
    pool: str = "judge"  # the words to use: a key of `POOLS`


@dataclass(frozen=True)
class Question:
    """One question of a prompt."""

    task: str
    answer: slice  # positions of the answer's tokens
    source: int  # the position of the statement that holds the answer


@dataclass(frozen=True)
class Prompt:
    """Token ids `[T]` with questions at the end, each followed by its right answer."""

    ids: torch.Tensor
    questions: tuple[Question, ...]


def write_prompts(
    settings: PromptSettings, tokenizer: PreTrainedTokenizerBase, filler: Sequence[int]
) -> list[Prompt]:
    """Prompts made of stretches of `filler` (token ids), the same on every machine. Raises
    `RotationZooError` if their length leaves no room for statements outside the exact windows."""
    writer = _Writer(settings, tokenizer, filler)
    return [writer.write(number) for number in range(settings.prompts)]


@dataclass
class _Piece:
    """A question with its answer."""

    ids: list[int]
    answer: slice  # of the ids
    source: str | int  # the line with the answer, or the position of a passage in the filler


class _Writer:
    """Writes the prompts of one task."""

    def __init__(
        self, settings: PromptSettings, tokenizer: PreTrainedTokenizerBase, filler: Sequence[int]
    ):
        self.settings, self.tokenizer, self.filler = settings, tokenizer, filler
        self.questions = settings.questions or TASKS[settings.task]
        self.start = start_tokens(tokenizer)
        self.line_end = self._encode("\n")
        # Statements are put after the end of a line, if one is near.
        self.line_ends = {token for token in set(filler) if "\n" in tokenizer.decode([token])}

    def write(self, number: int) -> Prompt:
        seed = f"{self.settings.seed} {self.settings.task} {number}"
        draw = random.Random(seed)
        if self.settings.task == QUOTE:
            return self._write_quotes(draw)
        words = POOLS[self.settings.pool]
        exercise = EXERCISES[self.settings.task](random.Random(seed), words, self.questions)
        pieces = [self._question(asked) for asked in exercise.questions]
        blocks = [block for group in exercise.groups for block in group]
        hidden = sum(len(self._encode(line + "\n")) for block in blocks for line in block)
        filler, places = self._draw_filler(draw, pieces, hidden)
        positions = self._draw_positions(draw, filler, places, len(blocks))
        return self._ask(*self._hide(draw, exercise, filler, positions), pieces)

    def _write_quotes(self, draw: random.Random) -> Prompt:
        """A prompt that asks for passages of its own text."""
        lead = self._encode(_QUOTE_LEAD)
        cue = slice(len(lead), len(lead) + _QUOTE_CUE)
        answer = slice(cue.stop, cue.stop + _QUOTED)
        # The passages are drawn from the text; until then, any tokens take their place.
        empty = _Piece([0] * answer.stop + self.line_end, answer, 0)
        filler, places = self._draw_filler(draw, [empty] * self.questions, 0)
        passages = self._draw_passages(draw, filler, places)
        pieces = []
        for position in passages:
            passage = filler[position : position + _QUOTE_CUE + _QUOTED]
            pieces.append(_Piece([*lead, *passage, *self.line_end], answer, position))
        moved: dict[str | int, int] = {place: len(self.start) + place for place in passages}
        return self._ask([*self.start, *filler], moved, pieces)

    def _draw_filler(
        self, draw: random.Random, pieces: list[_Piece], hidden: int
    ) -> tuple[list[int], range]:
        """Filler that leaves room for questions and hidden tokens, and the positions in it at which
        statements may be put."""
        settings = self.settings
        asked = len(self.line_end) + sum(len(piece.ids) for piece in pieces)
        room = settings.length - len(self.start) - hidden - asked
        places = range(max(0, settings.first - len(self.start)), room - settings.recent)
        if len(places) < 2 * len(pieces):
            raise RotationZooError(
                f"prompts of {settings.length} tokens are too short for the task {settings.task}",
                hint="give a greater --lengths, or smaller --windows",
            )
        # A short filler is repeated.
        first = draw.randrange(len(self.filler))
        return [self.filler[(first + at) % len(self.filler)] for at in range(room)], places

    def _draw_positions(
        self, draw: random.Random, filler: list[int], places: range, count: int
    ) -> list[int]:
        """Positions in the filler, ascending: one at random in each of `count` equal parts."""
        positions = []
        for part in range(count):
            low = places.start + len(places) * part // count
            high = places.start + len(places) * (part + 1) // count
            position = draw.randrange(low, max(high, low + 1))
            ends = (at for at in range(position, high) if filler[at] in self.line_ends)
            positions.append(next(ends, position - 1) + 1)
        return positions

    def _draw_passages(self, draw: random.Random, filler: list[int], places: range) -> list[int]:
        """Random positions of passages whose cue occurs only once in the filler."""
        # The last passage must end before the recent window begins.
        places = range(places.start, places.stop - _QUOTE_CUE - _QUOTED)
        cues = [tuple(filler[at : at + _QUOTE_CUE]) for at in range(len(filler))]
        count = Counter(cues)
        passages: list[int] = []
        for position in self._draw_positions(draw, filler, places, self.questions):
            # Repeated text may have no unique cue; then any passage will do.
            tries = [position, *draw.choices(places, k=_TRIES)]
            unique = (at for at in tries if count[cues[at]] == 1 and at not in passages)
            passages.append(next(unique, position))
        return draw.sample(passages, len(passages))

    def _hide(
        self, draw: random.Random, exercise: Exercise, filler: list[int], positions: list[int]
    ) -> tuple[list[int], dict[str | int, int]]:
        """The filler with a block of lines at each position, and where each line is."""
        groups = [number for number, blocks in enumerate(exercise.groups) for _ in blocks]
        draw.shuffle(groups)
        waiting = [iter(blocks) for blocks in exercise.groups]
        ids, places, before = list(self.start), dict[str | int, int](), 0
        for position, group in zip(positions, groups, strict=True):
            ids += filler[before:position]
            before = position
            for line in next(waiting[group]):
                places[line] = len(ids)
                ids += self._encode(line + "\n")
        return ids + filler[before:], places

    def _ask(self, ids: list[int], places: Mapping[str | int, int], pieces: list[_Piece]) -> Prompt:
        """The prompt: the ids with questions at the end, whose sources have these places."""
        ids = ids + self.line_end  # the filler may stop in the middle of a line
        questions = []
        for piece in pieces:
            answer = slice(len(ids) + piece.answer.start, len(ids) + piece.answer.stop)
            questions.append(Question(self.settings.task, answer, places[piece.source]))
            ids += piece.ids
        return Prompt(torch.tensor(ids), tuple(questions))

    def _question(self, asked: Asked) -> _Piece:
        """A question and its answer, tokenized together as in the statement."""
        ids = self._encode(asked.prefix + asked.answer + "\n")
        first = common_length(ids, self._encode(asked.prefix))
        last = common_length(ids, self._encode(asked.prefix + asked.answer))
        return _Piece(ids, slice(first, last), asked.line)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return ids


def common_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """The length of the common beginning."""
    pairs = zip(one, other, strict=False)
    differing = (at for at, (first, second) in enumerate(pairs) if first != second)
    return next(differing, min(len(one), len(other)))


# ---- answers


@dataclass(frozen=True)
class Answers:
    """A model's answers to the questions of some prompts, in order."""

    correct: torch.Tensor  # boolean `[questions]`: whether the greedy answer is exactly right
    log_probability: torch.Tensor  # of the whole right answer in nats, float64 `[questions]`


@torch.no_grad()
def read_answers(model: PreTrainedModel, prompts: Sequence[Prompt]) -> Answers:
    """The model's answers to a batch of prompts of one length. One forward pass is enough: greedy
    decoding writes exactly the right answer if and only if each token of it is the most probable
    one after those before it. Later questions follow the right answers to earlier ones."""
    ids = torch.stack([prompt.ids for prompt in prompts]).to(input_device(model))
    states, correct, log_probability = run_decoder(model, ids), [], []
    # Row by row, because a batch of short prompts would have more logits than a model has weights.
    for number, prompt in enumerate(prompts):
        first = prompt.questions[0].answer.start - 1
        logits = states.row(number).logits(slice(first, ids.shape[1]))[0]
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
    """All answers, in order."""
    correct = torch.cat([part.correct for part in parts])
    return Answers(correct, torch.cat([part.log_probability for part in parts]))
