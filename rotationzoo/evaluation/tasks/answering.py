"""Asking the recall tasks: of the exact model first, and of every arm and cache what it can do; and
the score of the answers: how many are right, and how probable the right ones are."""

import operator
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain, compress, product
from typing import Any

import torch
from transformers import PreTrainedModel

from rotationzoo.artifact import scores
from rotationzoo.codec.windows import CacheLayout
from rotationzoo.evaluation.forward import Pace, Reader, Trial
from rotationzoo.evaluation.tasks.prompts import Series, TaskPlan
from rotationzoo.evaluation.tasks.resumed import SavedAnswers
from rotationzoo.linalg.paired import weighted_mean
from rotationzoo.model.loading import forward_errors
from rotationzoo.model.prediction import counting_layers
from rotationzoo.progress import InTokens, Progress
from rotationzoo.recall.prompts import Answers, Prompt, join_answers, read_answers
from rotationzoo.simulation.simulated import Simulation
from rotationzoo.words import finish

# A model can do a task if the statements add at least this share to the questions that it answers,
# or take at least half from the nats that the right answers lack.
LEAST_ADDED, LEAST_TAKEN = 0.2, 0.5
_EXACT_STAGE = "answering with the exact cache"
_LEAST_YIELD = 0.5  # of the best: right answers a token for which arms are asked in little time


@dataclass(frozen=True)
class ExactAnswers:
    """The exact model's answers to the questions of one series."""

    series: Series
    answers: Answers
    blind: Answers  # its answers to the first of them where the statements are cut away

    @property
    def can_do(self) -> bool:
        """Whether the model can do the task: only then are the arms compared on it."""
        first = len(self.blind.correct)
        added = self.answers.correct[:first].double().mean() - self.blind.correct.double().mean()
        lacking = self.answers.log_probability[:first].mean()
        blind = self.blind.log_probability.mean()
        return bool(added >= LEAST_ADDED or lacking >= (1 - LEAST_TAKEN) * blind)

    def first(self, questions: int) -> "ExactAnswers":
        """The answers to the first questions alone, in whole prompts."""
        series = self.series.part(0, questions)
        return replace(self, series=series, answers=self.answers.first(series.questions))


@dataclass(frozen=True)
class TaskAnswers:
    """All answers of an evaluation."""

    plan: TaskPlan
    questions: int  # asked so far of each task and length that the exact model can do
    exact: list[ExactAnswers]
    arms: dict[tuple[CacheLayout, str], list[Answers]]
    """Keyed by cache and name of the arm: the answers to each series that the exact model can
    do. An arm that is not asked further has answered only the first questions."""

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
                task, length = exact.series.task, exact.series.length
                notes.append(
                    f"the exact model cannot do {task} in {length:,} tokens, so no arm is asked: "
                    f"{_describe(exact.answers)} (without the statements: {_describe(exact.blind)})"
                )
        return notes


@dataclass(frozen=True)
class Request:
    """Prompts of one length, and what they are read through: a simulation, or the model alone."""

    prompts: list[Prompt]
    simulation: Simulation | None = None
    timed_as: Reader = None


@dataclass(frozen=True)
class Asking:
    """Reads answers in batches and reports how many tokens of a stage's prompts are read."""

    model: PreTrainedModel
    name: str  # what errors call the model
    tokens: int  # how many a forward pass may read; a longer prompt has one of its own
    progress: Progress
    pace: Pace = field(default_factory=Pace)
    saved: SavedAnswers = field(default_factory=SavedAnswers)

    def ask(self, stage: str, requests: Sequence[Request]) -> list[Answers]:
        """The answers to each request."""
        batches = [self._cut(request.prompts) for request in requests]
        passes = [count_tokens(rows) for rows in chain.from_iterable(batches)]
        progress, done = InTokens(self.progress, passes), 0
        progress(stage, 0, len(passes))
        answers = []
        for request, of_request in zip(requests, batches, strict=True):
            parts, prompts, simulation = [], request.prompts, request.simulation
            if (known := self.saved.find(request.timed_as, prompts)) is not None:
                answers.append(known)
                done += len(of_request)
                progress(stage, done, len(passes))
                continue
            running = nullcontext() if simulation is None else simulation.running(self.model)
            catching = forward_errors(self.name, self._batch(prompts), len(prompts[0].ids))
            timing = self.pace.timing(request.timed_as, count_tokens(prompts))
            with catching, running, timing, counting_layers(self.model, progress.tell_part):
                for rows in of_request:
                    parts.append(read_answers(self.model, rows))
                    done += 1
                    progress(stage, done, len(passes))
            answers.append(join_answers(parts))
            self.saved.save(request.timed_as, prompts, answers[-1])
        return answers

    def _cut(self, prompts: list[Prompt]) -> list[list[Prompt]]:
        size = self._batch(prompts)
        return [prompts[start : start + size] for start in range(0, len(prompts), size)]

    def _batch(self, prompts: list[Prompt]) -> int:
        return max(1, self.tokens // len(prompts[0].ids))


def answer_tasks(
    asking: Asking,
    plan: TaskPlan,
    trial: Trial,
    open_arms: Callable[[TaskAnswers], Collection[str]] = lambda answers: (),
    *,
    is_short: bool = False,
) -> TaskAnswers:
    """Ask the exact model, and every arm with every cache what the exact model can do, until no arm
    is open or all questions are asked. If time `is_short`, arms are asked only where its right
    answers cost few tokens. Later rounds ask the `open_arms` alone, and an interrupt (Ctrl-C) ends
    them with a note. Raises `RotationZooError` for prompts that do not fit the memory."""
    first, *later = plan.settings.rounds
    exact = _ask_exact(asking, [each.part(0, first) for each in plan.series])
    if is_short:
        plan, exact = choose_cheap(plan, exact)
    able = [each.series for each in exact if each.can_do]
    answers = TaskAnswers(plan, first, exact, _ask_arms(asking, trial, able))
    for questions in later:
        names = open_arms(answers) if answers.asked else ()
        if not names:
            break
        trial = replace(trial, arms=[arm for arm in trial.arms if arm.name in names])
        try:
            answers = _ask_more(asking, trial, answers, questions)
        except KeyboardInterrupt:
            kept = f"{answers.questions} questions of each task count"
            plan.notes.append(f"interrupted: {kept}{asking.saved.leave()}")
            break
    return answers


def _ask_exact(asking: Asking, series: Sequence[Series]) -> list[ExactAnswers]:
    """The exact model's answers with and without the statements, which tell what it can do."""
    blind = asking.ask("answering without the statements", [Request(each.blind) for each in series])
    # Asked last, because the last prompts set the pace, and blind ones are short.
    given = asking.ask(_EXACT_STAGE, [Request(each.prompts) for each in series])
    return [ExactAnswers(*each) for each in zip(series, given, blind, strict=True)]


def choose_cheap(
    plan: TaskPlan, exact: Sequence[ExactAnswers]
) -> tuple[TaskPlan, list[ExactAnswers]]:
    """The series in which a right answer of the exact model costs the fewest tokens, and a note on
    the others. No arm has a say in the choice, so it favors none."""
    yields = []
    for each in exact:
        right = each.answers.correct.sum().item() * each.can_do
        yields.append(right / count_tokens(each.series.prompts))
    chosen = [each >= _LEAST_YIELD * max(yields) for each in yields]
    if not any(yields) or all(chosen):
        return plan, list(exact)
    others = compress(exact, map(operator.not_, chosen))
    words = [f"{each.series.task} in {each.series.length:,} tokens" for each in others]
    note = f"left out, because a right answer takes more time there: {', '.join(words)}"
    series = list(compress(plan.series, chosen))
    return replace(plan, series=series, notes=[*plan.notes, note]), list(compress(exact, chosen))


def _ask_more(asking: Asking, trial: Trial, answers: TaskAnswers, questions: int) -> TaskAnswers:
    """The answers after another round, with `questions` questions in all."""
    pairs = list(zip(answers.plan.series, answers.exact, strict=True))
    able = [series for series, each in pairs if each.can_do]
    added = [series.part(answers.questions, questions) for series in able]
    deciding = [arm.name for arm in trial.arms]
    ending = f", questions {answers.questions + 1} to {questions} of each task"
    if not answers.plan.settings.minutes:
        seconds = asking.pace.estimate(sum(count_tokens(each.prompts) for each in added), deciding)
        more = f"{questions - answers.questions} more questions of each task"
        asking.pace.tell(f"not decided yet: {more}{finish(seconds)}")
    requests = [Request(series.prompts) for series in added]
    replies = iter(asking.ask(f"{_EXACT_STAGE}{ending}", requests))
    arms = dict(answers.arms)
    for key, more_answers in _ask_arms(asking, trial, added, ending).items():
        arms[key] = [join_answers(pair) for pair in zip(arms[key], more_answers, strict=True)]
    exact = []
    for series, each in pairs:
        if each.can_do:
            joined = join_answers([each.answers, next(replies)])
            each = replace(each, series=series.part(0, questions), answers=joined)
        exact.append(each)
    return TaskAnswers(answers.plan, questions, exact, arms)


def ask_also(asking: Asking, trial: Trial, answers: TaskAnswers) -> TaskAnswers:
    """The answers with those of further arms to the questions of the first round."""
    first = answers.plan.settings.rounds[0]
    series = [each.first(first).series for each in answers.asked]
    given = _ask_arms(asking, trial, series)
    return replace(answers, arms={**answers.arms, **given})


def _ask_arms(
    asking: Asking, trial: Trial, series: Sequence[Series], ending: str = ""
) -> dict[tuple[CacheLayout, str], list[Answers]]:
    """The answers of every arm with every cache to each of the series."""
    given = {}
    for cache, arm in product(trial.caches, trial.arms):
        place = cache, arm.name
        simulation = Simulation(arm.codec, cache, trial.geometry, set(trial.layers))
        requests = [Request(each.prompts, simulation, place) for each in series]
        # A stage of its own, because each takes another time.
        given[place] = asking.ask(f"answering with {arm.name}{ending}", requests)
    return given


def count_tokens(prompts: Sequence[Prompt]) -> int:
    """The tokens of all prompts."""
    return sum(len(prompt.ids) for prompt in prompts)


def _describe(answers: Answers) -> str:
    """How many of the answers are right, and the mean log probability of the right ones."""
    correct, nats = answers.correct, answers.log_probability.mean()
    return f"{int(correct.sum())} of {len(correct)} right, {nats:.1f} nats an answer"


# ---- scores

Reply = tuple[Series, Answers]
"""The prompts of one task and length, and the answers to all of their questions."""


def score_arm(
    answers: TaskAnswers, cache: CacheLayout, arm: str
) -> tuple[dict[str, scores.TaskRecall], scores.Recall | None]:
    """The scores of an arm with one cache: of each task, and of all together."""
    asked = zip(answers.asked, answers.arms[cache, arm], strict=True)
    # Of arms that decide nothing, only the first questions.
    replies = [(exact.series.part(0, len(given.correct)), given) for exact, given in asked]
    tasks: dict[str, scores.TaskRecall] = {}
    for task in dict.fromkeys(series.task for series, _ in replies):
        same = [reply for reply in replies if reply[0].task == task]
        lengths = [
            scores.LengthScore(length=series.length, **_score(given)) for series, given in same
        ]
        tasks[task] = scores.TaskRecall(**_score_task(same), by_length=lengths)
    return tasks, _score_all(replies)


def score_exact(
    answers: TaskAnswers,
) -> tuple[dict[str, scores.ExactTaskRecall], scores.Recall | None]:
    """The scores of the exact model: of each task, and of all that it can do together."""
    tasks: dict[str, scores.ExactTaskRecall] = {}
    for task in dict.fromkeys(exact.series.task for exact in answers.exact):
        same = [exact for exact in answers.exact if exact.series.task == task]
        done = [exact for exact in same if exact.can_do]
        replies = [(exact.series, exact.answers) for exact in done or same]
        lengths = []
        for exact in same:
            figures = {"length": exact.series.length, **_score(exact.answers)}
            lengths.append(scores.ExactLengthScore(**figures, can_do=exact.can_do))
        recall = {**_score_task(replies), "by_length": lengths, "can_do": bool(done)}
        tasks[task] = scores.ExactTaskRecall(**recall, prompts=_prompt_sizes(replies))
    return tasks, _score_all([(exact.series, exact.answers) for exact in answers.asked])


def _score_task(replies: Sequence[Reply]) -> dict[str, Any]:
    """The score of one task, with a digit for the answer to each question."""
    digits = [str(int(right)) for _, answers in replies for right in answers.correct]
    return {**dict(_score_all(replies) or {}), "correct": "".join(digits)}


def _score_all(replies: Sequence[Reply]) -> scores.Recall | None:
    """The score of all questions of several series, with its standard errors over prompts, because
    the questions of one prompt share its text; None for no series."""
    if not replies:
        return None
    given, sizes = join_answers([answers for _, answers in replies]), _prompt_sizes(replies)
    weights, errors = torch.tensor(sizes, dtype=torch.float64), {}
    figures = {"answered": given.correct.double(), "log_probability": given.log_probability}
    for name, values in figures.items():
        means = torch.stack([part.mean() for part in values.split(sizes)])
        errors[name] = weighted_mean(means, weights)[1]
    return scores.Recall(**_score(given), standard_error=errors)


def _score(answers: Answers) -> dict[str, Any]:
    return {
        "answered": int(answers.correct.sum()),
        "questions": len(answers.correct),
        "log_probability": answers.log_probability.mean().item(),
    }


def _prompt_sizes(replies: Sequence[Reply]) -> list[int]:
    """How many questions each prompt asks."""
    return [len(prompt.questions) for series, _ in replies for prompt in series.prompts]
