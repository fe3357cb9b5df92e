"""Asking the recall tasks: of the exact model first, and of every arm and cache what it can do."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import product

import torch
from transformers import PreTrainedModel

from rotationzoo.cache.simulated import Simulation
from rotationzoo.cache.windows import Cache
from rotationzoo.evaluation.forward import Trial
from rotationzoo.evaluation.tasks.prompts import Series, TaskPlan
from rotationzoo.evaluation.through_cache import ThroughCache, real_arm
from rotationzoo.model.loading import forward_errors
from rotationzoo.progress import Progress, Tokens
from rotationzoo.recall.answers import Answers, read_answers
from rotationzoo.recall.prompts import Prompt

# A model can do a task if the statements add at least this share to the questions that it answers,
# or take at least half from the nats that the right answers lack.
LEAST_ADDED, LEAST_TAKEN = 0.2, 0.5


@dataclass(frozen=True)
class ExactAnswers:
    """The exact model's answers to the questions of one series."""

    series: Series
    answers: Answers
    blind: Answers
    """Its answers where the statements are cut away."""

    @property
    def can_do(self) -> bool:
        """Whether the model can do the task: only then are the arms compared on it."""
        added = self.answers.correct.double().mean() - self.blind.correct.double().mean()
        lacking, blind = self.answers.log_probability.mean(), self.blind.log_probability.mean()
        return bool(added >= LEAST_ADDED or lacking >= (1 - LEAST_TAKEN) * blind)


@dataclass(frozen=True)
class TaskAnswers:
    """All answers of an evaluation."""

    plan: TaskPlan
    exact: list[ExactAnswers]
    arms: dict[tuple[Cache, str], list[Answers]]
    """Keyed by cache and name of the arm: the answers to each series that the exact model can
    do."""

    @property
    def asked(self) -> list[ExactAnswers]:
        """The exact answers to the series that every arm was asked."""
        return [exact for exact in self.exact if exact.can_do]

    @property
    def notes(self) -> list[str]:
        """Which tasks are left out, and which the exact model cannot do."""
        notes = [*self.plan.notes]
        for exact in self.exact:
            if not exact.can_do:
                series = exact.series
                notes.append(
                    f"the exact model cannot do {series.task} in {series.length:,} tokens, so no "
                    f"arm is asked: {_describe(exact.answers)} (without the statements: "
                    f"{_describe(exact.blind)})"
                )
        return notes


class Asking:
    """Reads answers in batches and reports how many tokens of a stage's prompts are read.

    * `name`: what errors call the model;
    * `tokens`: how many a forward pass may read; a longer prompt has one of its own.
    """

    def __init__(self, model: PreTrainedModel, name: str, tokens: int, progress: Progress):
        self.model, self.name, self.tokens, self.progress = model, name, tokens, progress
        self.stage, self.done, self.total = "", 0, 0

    def begin(self, stage: str, series: Iterator[list[Prompt]]) -> None:
        """Begin a stage in which the prompts of these series will be asked."""
        tokens = sum(len(prompt.ids) for prompts in series for prompt in prompts)
        self.stage, self.done, self.total = stage, 0, tokens
        self._tell(0)

    def ask(
        self,
        prompts: list[Prompt],
        running: AbstractContextManager[None] | None = None,
        reader: ThroughCache | None = None,
    ) -> Answers:
        """The answers to prompts of one length, read inside the context `running`, or by
        `reader`."""
        length = len(prompts[0].ids)
        batch = max(1, self.tokens // length)
        parts = []
        with forward_errors(self.name, batch, length), running or nullcontext():
            for start in range(0, len(prompts), batch):
                rows = prompts[start : start + batch]
                parts.append(read_answers(self.model, rows, batch, reader))
                self._tell(len(rows) * length)
        correct = torch.cat([part.correct for part in parts])
        return Answers(correct, torch.cat([part.log_probability for part in parts]))

    def _tell(self, tokens: int) -> None:
        self.done += tokens
        self.progress(self.stage, Tokens(self.done), Tokens(self.total))


def answer_tasks(asking: Asking, plan: TaskPlan, trial: Trial) -> TaskAnswers:
    """Ask the exact model every question, and every arm with every cache those of the tasks that
    the exact model can do.

    Raises `RotationZooError` for prompts that do not fit the device's memory.
    """
    every = (prompts for series in plan.series for prompts in (series.prompts, series.blind))
    asking.begin("answering with the exact cache", every)
    exact = []
    for series in plan.series:
        answers, blind = asking.ask(series.prompts), asking.ask(series.blind)
        exact.append(ExactAnswers(series, answers, blind))
    asked = [each.series.prompts for each in exact if each.can_do]
    arms: dict[tuple[Cache, str], list[Answers]] = {}
    pairs = list(product(trial.caches, trial.arms))
    # A stage of its own, because a 2-bit cache is slower than the exact one.
    asking.begin("answering", (prompts for _ in pairs for prompts in asked))
    for cache, arm in pairs:
        if trial.real_cache:
            reader = ThroughCache(asking.model, real_arm(arm), cache)
            arms[cache, arm.name] = [asking.ask(prompts, reader=reader) for prompts in asked]
            continue
        simulation = Simulation(arm, cache, trial.geometry, set(trial.layers), trial.sides)
        # One simulation for each series, because it keeps the masks of every length.
        arms[cache, arm.name] = [
            asking.ask(prompts, simulation.running(asking.model)) for prompts in asked
        ]
    return TaskAnswers(plan, exact, arms)


def _describe(answers: Answers) -> str:
    """How many of the answers are right, and the mean log probability of the right ones."""
    log_probability = answers.log_probability.mean().item()
    correct = answers.correct
    return f"{int(correct.sum())} of {len(correct)} right, {log_probability:.1f} nats an answer"
