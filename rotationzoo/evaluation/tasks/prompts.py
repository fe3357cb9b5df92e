"""The recall tasks of an evaluation: the user's choice, and the prompts, which are written before
the weights are fetched."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from transformers import PreTrainedTokenizerBase

from rotationzoo.artifact.measured import Tasks
from rotationzoo.codec.windows import CacheLayout
from rotationzoo.errors import RotationZooError, UsageError
from rotationzoo.recall.prompts import Prompt, PromptSettings, write_prompts
from rotationzoo.recall.questions import QUOTE, TASKS
from rotationzoo.recipe import Data
from rotationzoo.text.rows import Corpus, read_corpus, start_tokens
from rotationzoo.words import nearest

SHORTEST = 2  # tokens of a prompt
MOST_QUESTIONS = 100_000
# Questions per task and length after which `auto` looks whether the decision is made.
LOOKS = 16, 32, 64, 128, 256, 512
STEP = 8  # questions per task and length after which a timed evaluation looks at the clock
SHORT = 1024  # tokens of prompts that a timed evaluation also tries, because they take less time
_LEAST_RECENT = 64  # the fewest tokens between statements and questions
_LEAD = 256  # the most tokens before the questions of a blind prompt


@dataclass(frozen=True)
class TaskSettings:
    """The recall tasks of one evaluation, as the user chose them."""

    names: tuple[str, ...] = tuple(TASKS)
    lengths: tuple[int, ...] = ()
    """Tokens per prompt. If empty, as many as rows of the text have, and fewer in short time."""
    questions: int | Literal["auto"] = "auto"
    """Questions per task and length, rounded up to whole prompts. `auto` asks until the decision
    is made, and at most the last of `LOOKS`."""
    first: int = MOST_QUESTIONS  # how many all arms are asked, at most those of the first look
    minutes: float | None = None  # the time limit, which decides how many are asked in one look

    @property
    def looks(self) -> tuple[int, ...]:
        """Questions per task and length after which the answers are looked at."""
        if self.questions != "auto":
            return (self.questions,)
        return LOOKS[-1:] if self.minutes else LOOKS

    @property
    def rounds(self) -> tuple[int, ...]:
        """Questions per task and length after which fewer arms or none are asked."""
        if self.minutes:
            return (*range(STEP, self.looks[-1], STEP), self.looks[-1])
        return tuple(sorted({min(self.first, self.looks[0]), *self.looks}))

    def find_lengths(self, length: int) -> tuple[int, ...]:
        """The tokens per prompt if the rows of the evaluated text have `length` tokens."""
        if self.lengths or not self.minutes or length <= SHORT:
            return self.lengths or (length,)
        return SHORT, length

    def most_tokens(self, length: int) -> int:
        """The tokens of all prompts, which have this length unless `lengths` are given."""
        prompts = sum(-(-self.looks[-1] // TASKS[name]) for name in self.names)
        return prompts * sum(self.find_lengths(length))

    def check(self) -> None:
        """Raise `UsageError` for an unknown task or a number out of range."""
        if unknown := [name for name in self.names if name not in TASKS]:
            problem = f"there is no recall task {unknown[0]!r}{nearest(unknown[0], TASKS)}"
            raise UsageError(problem, f"give some of {', '.join(TASKS)}, or all, or none")
        if not 1 <= self.looks[-1] <= MOST_QUESTIONS:
            problem = f"--questions must be at least 1 and at most {MOST_QUESTIONS:,}"
            raise UsageError(problem, "to ask none: --tasks none")
        if any(length < SHORTEST for length in self.lengths):
            problem = f"--lengths must be at least {SHORTEST}"
            raise UsageError(problem, "write them as: --lengths 2048,8192")


@dataclass(frozen=True)
class Series:
    """The prompts of one task and one length."""

    task: str
    length: int
    prompts: list[Prompt]
    blind: list[Prompt]  # the same questions without the statements that answer them

    def part(self, start: int, stop: int) -> "Series":
        """The prompts of the questions from `start` up to `stop`."""
        of_prompt = TASKS[self.task]
        among = slice(-(-start // of_prompt), -(-stop // of_prompt))
        return replace(self, prompts=self.prompts[among], blind=self.blind[among])


@dataclass(frozen=True)
class TaskPlan:
    """All prompts of an evaluation, the same for each arm and cache."""

    settings: TaskSettings
    lengths: tuple[int, ...]
    series: list[Series] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # which tasks are left out, and why
    first: int = 0  # the first position at which a statement may begin: the largest sink
    recent: int = 0  # tokens before the first question without a statement: the exact windows

    def describe(self, questions: int) -> Tasks:
        """The tasks for the report, with `questions` asked of each."""
        windows = {"first": self.first, "recent": self.recent}
        names, lengths = list(self.settings.names), list(self.lengths)
        return Tasks(names=names, lengths=lengths, questions=questions, **windows)


def plan_tasks(
    settings: TaskSettings,
    data: Data,
    text: Corpus,
    tokenizer: PreTrainedTokenizerBase,
    caches: Sequence[CacheLayout],
) -> TaskPlan:
    """Write the prompts with the evaluation's `text`; long prompts read more of its `data`. Tasks
    without room outside the exact windows are left out. Raises `RotationZooError` if none is left.
    """
    if not settings.names:
        return TaskPlan(settings, ())
    lengths, first = settings.find_lengths(data.length), max(cache.sink for cache in caches)
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
            # Enough prompts for the last look, with the same number of questions each.
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
            short = f"prompts of {length:,} tokens are too short to ask for {', '.join(crowded)}"
            plan.notes.append(f"{short} outside the exact windows")
    if settings.lengths and not plan.series:
        hint = "give greater --lengths, smaller --windows, or --tasks none"
        raise RotationZooError(plan.notes[-1], hint)
    return plan


def _read_filler(
    data: Data, text: Corpus, tokenizer: PreTrainedTokenizerBase, longest: int
) -> list[int]:
    """The token ids of the text, without the start tokens of rows: twice as many as the longest
    prompt has, unless the text is shorter."""
    tokens = 2 * longest
    if data.tokens < tokens:
        text = read_corpus(data.model_copy(update={"tokens": tokens}), tokenizer)
    start = len(start_tokens(tokenizer))
    return torch.cat([row[start:] for row in text.rows]).tolist()


def _blind_prompts(prompts: list[Prompt], recent: int, start: list[int]) -> list[Prompt]:
    """The ends of prompts: the questions and the text just before them, without statements. All
    get the length of the longest by padding at the end, which a causal model does not see."""
    # A statement ends `recent` tokens before the first question begins, or earlier.
    cuts = [prompt.questions[0].answer.start - min(recent, _LEAD) for prompt in prompts]
    blind = []
    for prompt, cut in zip(prompts, cuts, strict=True):
        padding = prompt.ids[-1:].repeat(cut - min(cuts))  # all prompts have one length
        ids = torch.cat([torch.tensor(start, dtype=padding.dtype), prompt.ids[cut:], padding])
        moved, by = [], len(start) - cut
        for question in prompt.questions:
            answer = slice(question.answer.start + by, question.answer.stop + by)
            moved.append(replace(question, answer=answer, source=question.source + by))
        blind.append(Prompt(ids, tuple(moved)))
    return blind
