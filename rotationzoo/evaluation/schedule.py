"""The time of an evaluation, by the pace of its first tokens, and the part that fits a limit."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from time import perf_counter

import torch
from transformers import PreTrainedModel

from rotationzoo.artifact.scores import Decision
from rotationzoo.evaluation.decision import SIMPLEST
from rotationzoo.evaluation.forward import Pace, Trial, token_losses
from rotationzoo.evaluation.prepare import Prepared
from rotationzoo.evaluation.probes import TOKENS
from rotationzoo.evaluation.tasks.answering import TaskAnswers, count_tokens
from rotationzoo.evaluation.tasks.prompts import Series
from rotationzoo.model.loading import input_device
from rotationzoo.words import counted, duration, finish

LEAST = 32  # questions of each task: where fewer fit, arms that decide nothing are left out
_TOKENS, _SECONDS = 128, 5.0  # after these seconds, other arms get the pace of the slowest


@torch.no_grad()
def find_pace(model: PreTrainedModel, row: torch.Tensor, trial: Trial, pace: Pace) -> None:
    """Set the pace of the exact model and of each arm by the first tokens of a row `[T]`."""
    ids, begun = row[None, :_TOKENS].to(input_device(model)), perf_counter()
    token_losses(model, ids[:, :8], 0)  # what runs first runs slower
    with pace.timing(None, ids.numel()):
        token_losses(model, ids, 0)
    for cache, arm in product(trial.caches, trial.arms):
        # A sink would keep short rows exact.
        reader, all_of_it = (cache, arm.name), replace(cache, sink=0)
        simulation = trial.simulate(all_of_it, arm)
        pace.seconds[reader] = max(pace.seconds.values())
        if perf_counter() - begun < _SECONDS:
            with simulation.running(model), pace.timing(reader, ids.numel()):
                token_losses(model, ids, 0)


@dataclass(frozen=True)
class Schedule:
    """The work of an evaluation. The `judged` arms are asked most."""

    ready: Prepared
    trial: Trial
    judged: Sequence[str]
    pace: Pace

    @property
    def names(self) -> list[str]:
        return [arm.name for arm in self.trial.arms]

    @property
    def record(self) -> float:
        """The seconds that the records for servers take."""
        makes = self.ready.job.record and self.ready.scaling is None
        return self.pace.estimate(TOKENS, self.judged[:1]) * len(self.ready.saved) * makes

    def _round_tokens(self, series: Sequence[Series]) -> list[int]:
        tokens = list[int]()
        for ends in pairwise((0, *self.ready.plan.settings.rounds)):
            tokens.append(sum(count_tokens(each.part(*ends).prompts) for each in series))
        return tokens

    def _ask(self, tokens: Sequence[int], is_first: bool) -> float:
        """The seconds of rounds with these `tokens`. A first round asks all arms."""
        first = self.pace.estimate(sum(tokens[:is_first]), self.names)
        return first + self.pace.estimate(sum(tokens[is_first:]), self.judged)

    def fitting(self, series: Sequence[Series], asked: int = 0) -> int:
        """How many more questions of each series than `asked` fit in the time, with the record and
        one batch of texts after them."""
        job, plan = self.ready.job, self.ready.plan
        rounds, tokens = (0, *plan.settings.rounds), self._round_tokens(series)
        done, text = rounds.index(asked), job.batch * job.data.length
        left = self.pace.left - self.record - self.pace.estimate(text, self.names)
        if asked == 0:
            blind = sum(count_tokens(each.part(*rounds[:2]).blind) for each in plan.series)
            left -= self.pace.estimate(blind, ())
        for end in range(done + 1, len(rounds)):
            if self._ask(tokens[done:end], done == 0) > left:
                return rounds[end - 1] - asked
        return rounds[-1] - asked

    @property
    def is_short(self) -> bool:
        """Whether the time is too short to ask everything."""
        plan = self.ready.plan
        return bool(plan.settings.minutes) and self.fitting(plan.series) < plan.settings.looks[-1]

    def fit(self) -> "Schedule":
        """The part that there is time for: without all but the shortest prompts, unless the user
        chose the lengths, and then without arms that decide nothing."""
        fitted, left_out = self, list[str]()
        plan = self.ready.plan
        if plan.series and self.is_short and not plan.settings.lengths:
            length = min(each.length for each in plan.series)
            series = [each for each in plan.series if each.length == length]
            left_out += [f"prompts of {each:,} tokens" for each in plan.lengths if each > length]
            plan = replace(plan, lengths=(length,), series=series)
            fitted = replace(self, ready=replace(self.ready, plan=plan))
        own = [arm.name for arm in self.trial.arms if arm.about.kind == "artifact"] or self.names
        for names in ([*own, *SIMPLEST], own):
            if fitted.is_short and fitted.fitting(plan.series) < LEAST:
                arms = [arm for arm in self.trial.arms if arm.name in names]
                fitted = replace(fitted, trial=replace(self.trial, arms=arms))
        left_out += [name for name in self.names if name not in fitted.names]
        if left_out:
            plan.notes.append(f"left out for lack of time: {', '.join(left_out)}")
        return fitted

    def tell(self) -> None:
        """Tell the user what will be done, how long it takes and when it ends."""
        job, plan, pace = self.ready.job, self.ready.plan, self.pace
        tokens = self._round_tokens(plan.series)
        questions, text = plan.settings.looks[0], counted(len(self.ready.text.rows), "text")
        number = plan.settings.rounds.index(questions) + 1
        first, more = self._ask(tokens[:number], True), self._ask(tokens[number:], False)
        if job.rungs:
            first = pace.estimate(tokens[0], self.judged[len(self.judged) // 2 :][:1])
            more = pace.estimate(sum(tokens), self.judged) - first
        seconds = first + pace.estimate(self.ready.text.tokens, self.names) + self.record
        if plan.settings.minutes:
            questions, text = plan.settings.looks[-1], "as much text as fits"
            seconds, more = pace.left, 0
        asked = f"{questions} questions of each task"
        if self.is_short:
            asked = "the questions whose answers cost least"
        record = ["a record for servers"] * bool(self.record)
        words = ["no rotations are named, so only baselines are measured"] * (not job.artifacts)
        words.append(", ".join([*[asked] * bool(plan.series), text, *record]) + finish(seconds))
        if more:
            words.append(f"more questions, unless these decide, take at most {duration(more)}")
            words.append("Ctrl-C keeps what was asked")
        pace.tell("; ".join(words))

    def time_more(self, made: Decision, answers: TaskAnswers) -> Decision:
        """The decision with the time of an evaluation that settles it."""
        if made.more_questions is None:
            return made
        tokens = sum(count_tokens(each.series.prompts) for each in answers.exact)
        tokens = tokens * made.more_questions // answers.questions + self.ready.text.tokens
        seconds = self.pace.estimate(tokens, self.names) + self.record
        return made.model_copy(update={"more_seconds": seconds})
