"""How long an evaluation takes by the pace of its first tokens, and what of it fits into the time
that there is."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from rotationzoo.evaluation.decision import SIMPLEST
from rotationzoo.evaluation.forward import Pace, Trial
from rotationzoo.evaluation.prepare import Prepared
from rotationzoo.evaluation.probes import TOKENS
from rotationzoo.evaluation.tasks.answering import count_tokens
from rotationzoo.figures import duration, finish
from rotationzoo.words import counted

LEAST = 32
"""Questions of each task that may decide. Where fewer would fit, other arms are left out."""


@dataclass(frozen=True)
class Schedule:
    """What an evaluation has to do. The `judged` arms are asked most."""

    ready: Prepared
    trial: Trial
    judged: Sequence[str]
    pace: Pace

    @property
    def names(self) -> list[str]:
        """Of all arms."""
        return [arm.name for arm in self.trial.arms]

    @property
    def record(self) -> float:
        """Seconds that it takes to record what servers answer."""
        makes = self.ready.job.record and self.ready.scaling is None
        return self.pace.estimate(TOKENS, self.judged[:1]) * len(self.ready.saved) * makes

    def round_tokens(self) -> list[int]:
        """The tokens of the prompts of each round."""
        ends, series = (0, *self.ready.plan.settings.rounds), self.ready.plan.series
        parts = [[each.part(*pair).prompts for each in series] for pair in pairwise(ends)]
        return [sum(map(count_tokens, prompts)) for prompts in parts]

    def ask(self, tokens: Sequence[int], is_first: bool) -> float:
        """The seconds of rounds of so many tokens. All arms are asked in the first of all."""
        first = self.pace.estimate(sum(tokens[:is_first]), self.names)
        return first + self.pace.estimate(sum(tokens[is_first:]), self.judged)

    def fitting(self, asked: int = 0) -> int:
        """How many questions of each task, beside the `asked`, can be asked before the record and a
        batch of texts take the rest of the time."""
        job, rounds = self.ready.job, (0, *self.ready.plan.settings.rounds)
        text = self.pace.estimate(job.batch * job.data.length, self.names)
        done, tokens = rounds.index(asked), self.round_tokens()
        for end in range(done + 1, len(rounds)):
            if self.ask(tokens[done:end], done == 0) > self.pace.left - self.record - text:
                return rounds[end - 1] - asked
        return rounds[-1] - asked

    def fit(self) -> "Schedule":
        """What there is time for: other arms are left out, with a note, where too few questions
        would fit that decide."""
        settings, notes, fitted = self.ready.plan.settings, self.ready.plan.notes, self
        own = [arm.name for arm in self.trial.arms if arm.about.kind == "artifact"]
        for names in ([*own, *SIMPLEST], own or self.names):
            if settings.timed and fitted.fitting() < min(LEAST, settings.looks[-1]):
                arms = [arm for arm in self.trial.arms if arm.name in names]
                fitted = replace(self, trial=replace(self.trial, arms=arms))
        if left_out := [name for name in self.names if name not in fitted.names]:
            notes.append(f"left out for lack of time: {', '.join(left_out)}")
        return fitted

    def tell(self) -> None:
        """Tell what will be done, how long it takes and when it ends."""
        job, plan, pace, tokens = self.ready.job, self.ready.plan, self.pace, self.round_tokens()
        words = [] if job.artifacts else ["no rotations are named, so these are baselines alone"]
        questions, text = plan.settings.looks[0], counted(len(self.ready.text.rows), "text")
        number = plan.settings.rounds.index(questions) + 1
        first, more = self.ask(tokens[:number], True), self.ask(tokens[number:], False)
        if job.rungs:
            first = pace.estimate(tokens[0], self.judged[len(self.judged) // 2 :][:1])
            more = pace.estimate(sum(tokens), self.judged) - first
        seconds = first + pace.estimate(self.ready.text.tokens, self.names) + self.record
        if plan.settings.timed:
            questions, text = max(self.fitting(), plan.settings.rounds[0]), "as much text as fits"
            seconds, more = pace.left, 0
        parts = [
            f"{questions} questions of each task in {length:,} tokens" for length in plan.lengths
        ]
        parts += [text] + ["a record for servers"] * bool(self.record)
        words.append(", ".join(parts) + finish(seconds))
        if plan.series and more:
            more_words = f"more questions, unless these decide, take at most {duration(more)}"
            words.append(f"{more_words}; Ctrl-C keeps what was asked")
        pace.tell("; ".join(words))

    def time_more(self, asked: int, questions: int) -> float:
        """Seconds of an evaluation with so many `questions` of each task, of which `asked` are
        known."""
        tokens = [count_tokens(each.part(0, asked).prompts) for each in self.ready.plan.series]
        seconds = self.pace.estimate(sum(tokens) / asked * questions, self.names)
        return seconds + self.pace.estimate(self.ready.text.tokens, self.names) + self.record
