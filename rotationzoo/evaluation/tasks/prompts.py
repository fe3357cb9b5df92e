"""The recall tasks that an evaluation asks: the user's choice, and the prompts, which are written
before the weights are fetched."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from rotationzoo.artifact.measured import Tasks
from rotationzoo.codec.windows import CacheLayout
from rotationzoo.errors import RotationZooError, UsageError
from rotationzoo.recall.prompts import Prompt, PromptSettings, write_prompts
from rotationzoo.recall.questions import QUOTE, TASKS
from rotationzoo.recipe import Data
from rotationzoo.recipe.rope import check_positions
from rotationzoo.text.rows import Corpus, read_corpus, start_tokens
from rotationzoo.words import nearest

SHORTEST = 2  # tokens of a prompt
MOST_QUESTIONS = 100_000
LOOKS = 16, 32, 64, 128, 256, 512
"""Questions per task and length after which `auto` looks whether the decision is made."""
STEP = 8  # questions per task and length, after which a timed evaluation looks at the clock
SHORT = 1024
"""Tokens of the prompts that a timed evaluation also tries: an answer costs less in them."""
_LEAST_RECENT = 64  # tokens between statements and questions where the exact windows are smaller
_LEAD = 256  # tokens, at most, before the questions of a blind prompt


@dataclass(frozen=True)
class TaskSettings:
    """The recall tasks of one evaluation, as the user chose them."""

    names: tuple[str, ...] = tuple(TASKS)  # names of recall tasks; empty for none
    lengths: tuple[int, ...] = ()
    """Tokens per prompt. If empty, the prompts are as long as the rows of the evaluated text, and
    where time is short, some are shorter."""
    questions: int | Literal["auto"] = "auto"
    """Questions per task and length, rounded up to whole prompts; `auto` asks until the decision
    is made, and at most the last of `LOOKS`."""
    first: int = MOST_QUESTIONS
    """Of these, those that every arm is asked, at most those of the first look; others decide."""
    minutes: float | None = None
    """In which all is done: time decides how many are asked, and one look at the end is enough."""

    @property
    def looks(self) -> tuple[int, ...]:
        """Questions per task and length after which the answers are looked at."""
        if self.questions != "auto":
            return (self.questions,)
        return LOOKS[-1:] if self.minutes else LOOKS

    @property
    def rounds(self) -> tuple[int, ...]:
        """Questions per task and length after which fewer arms are asked, or none."""
        if self.minutes:
            return (*range(STEP, self.looks[-1], STEP), self.looks[-1])
        return tuple(sorted({min(self.first, self.looks[0]), *self.looks}))

    def find_lengths(self, length: int) -> tuple[int, ...]:
        """The tokens per prompt where the rows of the evaluated text have `length` tokens."""
        if self.lengths or not self.minutes or length <= SHORT:
            return self.lengths or (length,)
        return SHORT, length

    def most_tokens(self, length: int) -> int:
        """The tokens of all prompts, of this length unless `lengths` are given."""
        prompts = sum(-(-self.looks[-1] // TASKS[name]) for name in self.names)
        return prompts * sum(self.find_lengths(length))

    def check(self) -> None:
        """Raise `UsageError` for a task that does not exist, or a number that is out of range."""
        if unknown := [name for name in self.names if name not in TASKS]:
            problem = f"there is no recall task {unknown[0]!r}{nearest(unknown[0], TASKS)}"
            hint = f"give some of {', '.join(TASKS)}, or all, or none"
            raise UsageError(problem, hint)
        if not 1 <= self.looks[-1] <= MOST_QUESTIONS:
            hint = "leave out the tasks: none"
            raise UsageError(f"--questions must be at least 1 and at most {MOST_QUESTIONS:,}", hint)
        if any(length < SHORTEST for length in self.lengths):
            hint = "write them as: --lengths 2048,8192"
            raise UsageError(f"--lengths must be at least {SHORTEST}", hint)

    def check_positions(self, config: PretrainedConfig) -> None:
        """Raise `RotationZooError` if prompts are longer than the model has positions."""
        if self.names and self.lengths:
            check_positions(config, max(self.lengths), "prompts", "give --lengths of at most {}")


@dataclass(frozen=True)
class Series:
    """The prompts of one task and one length."""

    task: str
    length: int
    prompts: list[Prompt]
    blind: list[Prompt]  # the same questions without the statements that answer them

    @property
    def questions(self) -> int:
        """Questions in all prompts."""
        return sum(len(prompt.questions) for prompt in self.prompts)

    def part(self, start: int, stop: int) -> "Series":
        """The prompts of the questions from `start` up to `stop`."""
        of_prompt = TASKS[self.task]
        among = slice(-(-start // of_prompt), -(-stop // of_prompt))
        return replace(self, prompts=self.prompts[among], blind=self.blind[among])


@dataclass(frozen=True)
class TaskPlan:
    """All prompts of an evaluation, the same for every arm and every cache."""

    settings: TaskSettings
    lengths: tuple[int, ...]
    series: list[Series] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # which tasks are left out, and why
    first: int = 0
    """The first position at which a statement may begin: the largest sink of all caches."""
    recent: int = 0
    """Tokens before the first question that hold no statement: all that any query reads exact."""

    def describe(self, questions: int) -> Tasks:
        """The tasks as the report has them, with `questions` asked of each."""
        return Tasks(
            names=list(self.settings.names),
            lengths=list(self.lengths),
            questions=questions,
            first=self.first,
            recent=self.recent,
        )


def plan_tasks(
    settings: TaskSettings,
    data: Data,
    text: Corpus,
    tokenizer: PreTrainedTokenizerBase,
    caches: Sequence[CacheLayout],
) -> TaskPlan:
    """Write the prompts, hidden in the evaluation's own `text`, of whose `data` more is read for
    longer prompts. A task that has no room outside the exact windows is left out, with a note.
    Raises `RotationZooError` where the user's lengths leave nothing to ask."""
    if not settings.names:
        return TaskPlan(settings, ())
    lengths = settings.find_lengths(data.length)
    first = max(cache.sink for cache in caches)
    recent = max(_LEAST_RECENT, *(cache.reach for cache in caches))
    plan = TaskPlan(settings, lengths, first=first, recent=recent)
    filler = _read_filler(data, text, tokenizer, max(lengths))
    for length in lengths:
        crowded = []
        for task in settings.names:
            if task == QUOTE and length > len(filler):
                # A passage that the text repeats could be copied from the exact window.
                plan.notes.append(f"no passages are quoted in {length:,} tokens: the text is short")
                continue
            # Enough prompts, with equally many questions each, for the last look.
            count = -(-settings.looks[-1] // TASKS[task])
            questions = -(-settings.looks[-1] // count)
            wanted = PromptSettings(task, count, length, questions, first, recent, data.seed)
            try:
                prompts = write_prompts(wanted, tokenizer, filler)
            except RotationZooError:
                crowded.append(task)
                continue
            blind = _blind_prompts(prompts, recent, start_tokens(tokenizer))
            plan.series.append(Series(task, length, prompts, blind))
        if crowded:
            plan.notes.append(
                f"prompts of {length:,} tokens are too short to ask for {', '.join(crowded)} "
                "outside the exact windows"
            )
    # Lengths that the user gave and that leave nothing to ask are a mistake, found in time.
    if settings.lengths and not plan.series:
        hint = "give greater --lengths, smaller --windows, or --tasks none"
        raise RotationZooError(plan.notes[-1], hint)
    return plan


def _read_filler(
    data: Data, text: Corpus, tokenizer: PreTrainedTokenizerBase, longest: int
) -> list[int]:
    """The token ids of the text, without the start tokens of its rows: at least twice as many as
    the longest prompt has, unless the text is shorter."""
    tokens = 2 * longest
    if data.tokens < tokens:
        text = read_corpus(data.model_copy(update={"tokens": tokens}), tokenizer)
    start = len(start_tokens(tokenizer))
    return torch.cat([row[start:] for row in text.rows]).tolist()


def _blind_prompts(prompts: list[Prompt], recent: int, start: list[int]) -> list[Prompt]:
    """The ends of prompts: the questions and the text just before them, which holds no statement.
    They are filled up to the longest after the last answer, where a causal model does not see it.
    """
    # A statement ends `recent` tokens before the first question begins, or earlier.
    cuts = [prompt.questions[0].answer.start - min(recent, _LEAD) for prompt in prompts]
    blind = []
    for prompt, cut in zip(prompts, cuts, strict=True):
        padding = prompt.ids[-1:].repeat(cut - min(cuts))  # for all prompts have one length
        ids = torch.cat([torch.tensor(start, dtype=padding.dtype), prompt.ids[cut:], padding])
        moved, by = [], len(start) - cut
        for question in prompt.questions:
            answer = slice(question.answer.start + by, question.answer.stop + by)
            moved.append(replace(question, answer=answer, source=question.source + by))
        blind.append(Prompt(ids, tuple(moved)))
    return blind
