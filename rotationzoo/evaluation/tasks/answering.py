"""Asks the recall tasks: all of the exact model, and of each arm and cache those that it can do.
Scores the answers: how many are right, and how probable the right ones are."""

import operator
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
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

# A model can do a task if the statements add this share of the questions to those that it answers,
# or if they take this share of the nats from the loss of the right answers.
_LEAST_ADDED, _LEAST_TAKEN = 0.2, 0.5
_EXACT_STAGE = "answering with the exact cache"
_LEAST_YIELD = 0.5  # right answers per token, relative to the best, that are asked in short time
Place = tuple[CacheLayout, str]  # a cache, and the name of an arm


@dataclass(frozen=True)
class ExactAnswers:
    """The exact model's answers to the questions of one series."""

    series: Series
    answers: Answers
    blind: Answers  # to the first questions, without the statements

    @property
    def can_do(self) -> bool:
        """Whether the model can do the task. Arms are only compared on such tasks."""
        first = len(self.blind.correct)
        added = self.answers.correct[:first].double().mean() - self.blind.correct.double().mean()
        lacking = self.answers.log_probability[:first].mean()
        blind = self.blind.log_probability.mean()
        return bool(added >= _LEAST_ADDED or lacking >= (1 - _LEAST_TAKEN) * blind)


@dataclass(frozen=True)
class TaskAnswers:
    """All answers of an evaluation."""

    plan: TaskPlan
    questions: int  # asked so far of each task and length that the exact model can do
    exact: list[ExactAnswers]
    arms: dict[Place, list[Answers]]
    """The answers to each series that the exact model can do. Arms that decide nothing have
    answered only the first questions."""

    @property
    def asked(self) -> list[ExactAnswers]:
        """The exact answers to the series that arms are asked."""
        return [exact for exact in self.exact if exact.can_do]

    @property
    def notes(self) -> list[str]:
        """The tasks that are left out, and those that the exact model cannot do."""
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
class Asking:
    """Reads answers in batches, and reports how many tokens of a stage were read."""

    model: PreTrainedModel
    name: str  # of the model in errors
    tokens: int  # per forward pass; a longer prompt gets a pass to itself
    progress: Progress
    pace: Pace
    saved: SavedAnswers

    def ask(
        self,
        stage: str,
        asked: Sequence[list[Prompt]],
        reader: Reader = None,
        simulation: Simulation | None = None,
    ) -> list[Answers]:
        """The answers to each list of prompts, which have one length, read through a simulation or
        by the model alone. Their time is that of the `reader`."""
        batches = [self._cut(prompts) for prompts in asked]
        passes = [count_tokens(rows) for rows in chain.from_iterable(batches)]
        progress, done = InTokens(self.progress, passes), 0
        progress(stage, 0, len(passes))
        answers = []
        for prompts, rows_of in zip(asked, batches, strict=True):
            if (known := self.saved.find(reader, prompts)) is not None:
                answers.append(known)
                done += len(rows_of)
                progress(stage, done, len(passes))
                continue
            parts = []
            running = nullcontext() if simulation is None else simulation.running(self.model)
            catching = forward_errors(self.name, len(rows_of[0]), len(prompts[0].ids))
            timing = self.pace.timing(reader, count_tokens(prompts))
            with catching, running, timing, counting_layers(self.model, progress.tell_part):
                for rows in rows_of:
                    parts.append(read_answers(self.model, rows))
                    done += 1
                    progress(stage, done, len(passes))
            answers.append(join_answers(parts))
            self.saved.save(reader, prompts, answers[-1])
        return answers

    def _cut(self, prompts: list[Prompt]) -> list[list[Prompt]]:
        size = max(1, self.tokens // len(prompts[0].ids))
        return [prompts[start : start + size] for start in range(0, len(prompts), size)]


def answer_tasks(
    asking: Asking,
    plan: TaskPlan,
    trial: Trial,
    open_arms: Callable[[TaskAnswers], Collection[str]],
    is_short: bool = False,
) -> TaskAnswers:
    """Ask the exact model, and each arm with each cache the tasks that it can do, until no arm is
    open or all questions are asked. If time `is_short`, arms are only asked where right answers
    cost few tokens. Later rounds ask only the `open_arms`; an interrupt (Ctrl-C) ends them with a
    note. Raises `RotationZooError` for prompts that do not fit the memory."""
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
            counted = f"{answers.questions} questions of each task count"
            plan.notes.append(f"interrupted: {counted}{asking.saved.leave()}")
            break
    return answers


def _ask_exact(asking: Asking, series: Sequence[Series]) -> list[ExactAnswers]:
    """The exact model's answers with and without the statements."""
    blind = asking.ask("answering without the statements", [each.blind for each in series])
    # Last, because the last prompts set the pace, and blind ones are short.
    given = asking.ask(_EXACT_STAGE, [each.prompts for each in series])
    return [ExactAnswers(*each) for each in zip(series, given, blind, strict=True)]


def choose_cheap(
    plan: TaskPlan, exact: Sequence[ExactAnswers]
) -> tuple[TaskPlan, list[ExactAnswers]]:
    """The series in which a right answer of the exact model costs the fewest tokens, and a note on
    the others. No arm affects the choice."""
    yields = []
    for each in exact:
        right = each.answers.correct.sum().item() * each.can_do
        yields.append(right / count_tokens(each.series.prompts))
    chosen = [each >= _LEAST_YIELD * max(yields) for each in yields]
    if not any(yields) or all(chosen):
        return plan, list(exact)
    others = compress(plan.series, map(operator.not_, chosen))
    words = [f"{each.task} in {each.length:,} tokens" for each in others]
    note = f"left out, because a right answer takes more time there: {', '.join(words)}"
    series = list(compress(plan.series, chosen))
    return replace(plan, series=series, notes=[*plan.notes, note]), list(compress(exact, chosen))


def _ask_more(asking: Asking, trial: Trial, answers: TaskAnswers, questions: int) -> TaskAnswers:
    """The answers after another round, with `questions` questions in all."""
    pairs = list(zip(answers.plan.series, answers.exact, strict=True))
    able = [series for series, each in pairs if each.can_do]
    added = [series.part(answers.questions, questions) for series in able]
    prompts = [series.prompts for series in added]
    ending = f", questions {answers.questions + 1} to {questions} of each task"
    if not answers.plan.settings.minutes:
        deciding = [arm.name for arm in trial.arms]
        seconds = asking.pace.estimate(sum(map(count_tokens, prompts)), deciding)
        more = f"{questions - answers.questions} more questions of each task"
        asking.pace.tell(f"not decided yet: {more}{finish(seconds)}")
    replies = iter(asking.ask(f"{_EXACT_STAGE}{ending}", prompts))
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
    """The answers, and those of further arms to the questions of the first round."""
    first = answers.plan.settings.rounds[0]
    series = [each.series.part(0, first) for each in answers.asked]
    return replace(answers, arms=answers.arms | _ask_arms(asking, trial, series))


def _ask_arms(
    asking: Asking, trial: Trial, series: Sequence[Series], ending: str = ""
) -> dict[Place, list[Answers]]:
    """The answers of each arm with each cache to each of the series. An arm is a stage."""
    given, prompts = {}, [each.prompts for each in series]
    for cache, arm in product(trial.caches, trial.arms):
        place, stage = (cache, arm.name), f"answering with {arm.name}{ending}"
        given[place] = asking.ask(stage, prompts, place, trial.simulate(cache, arm))
    return given


def count_tokens(prompts: Sequence[Prompt]) -> int:
    """The tokens of all prompts."""
    return sum(len(prompt.ids) for prompt in prompts)


def _describe(answers: Answers) -> str:
    """How many of the answers are right, and the mean log probability of the right ones."""
    correct, nats = answers.correct, answers.log_probability.mean()
    return f"{int(correct.sum())} of {len(correct)} right, {nats:.1f} nats an answer"


# ---- scores

Reply = tuple[Series, Answers]  # the prompts of one task and length, and all answers to them


def score_arm(
    answers: TaskAnswers, cache: CacheLayout, arm: str
) -> tuple[dict[str, scores.TaskRecall], scores.Recall | None]:
    """The scores of an arm with one cache: by task, and of all tasks together."""
    asked = zip(answers.asked, answers.arms[cache, arm], strict=True)
    # Arms that decide nothing were asked only the first questions.
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
    """The scores of the exact model: by task, and of all tasks that it can do together."""
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
    """The score of one task, with a digit for each answer."""
    digits = [str(int(right)) for _, answers in replies for right in answers.correct]
    return {**dict(_score_all(replies) or {}), "correct": "".join(digits)}


def _score_all(replies: Sequence[Reply]) -> scores.Recall | None:
    """The score of several series, or None without any. Its standard errors are over prompts,
    because the questions of a prompt share its text."""
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
