"""How long an evaluation takes by the pace of its first tokens, and what of it fits into the time
that there is."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise, product

from rotationzoo.evaluation.decision import SIMPLEST
from rotationzoo.evaluation.forward import Pace, Trial
from rotationzoo.evaluation.prepare import Prepared
from rotationzoo.evaluation.probes import TOKENS
from rotationzoo.evaluation.tasks.answering import count_tokens
from rotationzoo.figures import duration, finish
from rotationzoo.words import counted

LEAST = 32
"""Questions of each task that may decide; for these, other arms are left out and rows shortened."""


@dataclass(frozen=True)
class Schedule:
    """What an evaluation has to do. The `judged` arms are asked first and most."""

    ready: Prepared
    trial: Trial
    judged: Sequence[str]
    pace: Pace

    @cached_property
    def names(self) -> list[str]:
        """Of all arms."""
        return [arm.name for arm in self.trial.arms]

    @cached_property
    def record(self) -> float:
        """Seconds that it takes to record what servers answer."""
        makes = self.ready.job.record and self.ready.scaling is None
        return self.pace.estimate(TOKENS, self.judged[:1]) * len(self.ready.saved) * makes

    @property
    def reserve(self) -> float:
        """Seconds that must be left after the questions: for a batch of texts, and the record."""
        tokens = self.ready.job.batch * self.ready.job.data.length
        return self.pace.estimate(tokens, self.names) + self.record

    @cached_property
    def rounds(self) -> list[int]:
        """The tokens of the prompts of each round."""
        ends, series = (0, *self.ready.plan.settings.rounds), self.ready.plan.series
        parts = [[each.part(*pair).prompts for each in series] for pair in pairwise(ends)]
        return [sum(map(count_tokens, prompts)) for prompts in parts]

    def ask(self, first: int, end: int) -> float:
        """The seconds of some rounds. All arms are asked in the very first."""
        others = self.pace.estimate(sum(self.rounds[max(first, 1) : end]), self.judged)
        return others + self.pace.estimate(sum(self.rounds[first : min(end, 1)]), self.names)

    def fits(self, number: int) -> bool:
        """Whether there is time for the round of this number, from 0 on."""
        return self.ask(number, number + 1) < self.pace.left - self.reserve

    @property
    def questions(self) -> int:
        """How many of each task there is time for."""
        seconds = accumulate(self.ask(each, each + 1) for each in range(len(self.rounds)))
        count = sum(each < self.pace.left - self.reserve for each in seconds)
        return (0, *self.ready.plan.settings.rounds)[count]

    def fit(self) -> "Schedule":
        """What there is time for: where too few questions of the judged arms would fit, other arms
        are left out, with a note, and then rows and prompts are half as long, if nobody chose how
        long they are."""
        ready, trial = self.ready, self.trial
        if ready.job.minutes is None:
            return self
        length, fitted = ready.job.data.length, self
        chosen = not ready.job.fit_length or ready.plan.settings.lengths
        lengths = [length] if chosen or length < 4 * ready.start else [length, length // 2]
        own = [arm.name for arm in trial.arms if arm.about.kind == "artifact"] or self.names
        keep = self.names, [*own, *SIMPLEST], own
        for tokens, names in product(lengths, keep):
            if tokens != fitted.ready.job.data.length:
                fitted = replace(fitted, ready=ready.shorten(tokens))
            arms = [arm for arm in trial.arms if arm.name in names]
            fitted = replace(fitted, trial=replace(trial, arms=arms))
            if fitted.questions >= min(LEAST, ready.plan.settings.looks[-1]):
                break
        if left_out := [name for name in self.names if name not in fitted.names]:
            fitted.ready.plan.notes.append(f"left out for lack of time: {', '.join(left_out)}")
        return fitted

    def tell(self) -> None:
        """Tell what will be done, how long it takes and when it ends."""
        job, text, plan, pace = self.ready.job, self.ready.text, self.ready.plan, self.pace
        words = [] if job.artifacts else ["no rotations are named, so these are baselines alone"]
        looks, texts = plan.settings.looks, pace.estimate(text.tokens, self.names)
        least = counted(len(text.rows), "text")
        number = plan.settings.rounds.index(looks[0]) + 1
        first, questions, most = self.ask(0, number), looks[0], self.ask(number, len(self.rounds))
        if job.minutes is not None:
            questions = self.questions or plan.settings.rounds[0]
            texts, first, most = pace.left - self.record, 0.0, 0.0
            least = "as much text as there is time for"
        if job.rungs:
            cache = self.judged[len(self.judged) // 2 :][:1]
            first = pace.estimate(sum(self.rounds[:number]), cache)
            most = pace.estimate(sum(self.rounds), self.judged) - first
        parts = [least] + ["the record for servers"] * bool(self.record)
        if plan.series:
            parts.insert(0, f"{questions} questions of each task in {plan.lengths[0]:,} tokens")
        words.append(", ".join(parts) + finish(first + texts + self.record))
        if plan.series and most:
            more = f"more questions, unless these decide, take at most {duration(most)}"
            words.append(f"{more}; Ctrl-C keeps what was asked")
        pace.tell("; ".join(words))

    def time_more(self, asked: int, questions: int) -> float:
        """Seconds that as many new `questions` of each task take, with all that belongs to them,
        where the first `asked` of the prompts are known."""
        tokens = sum(count_tokens(each.part(0, asked).prompts) for each in self.ready.plan.series)
        tokens = tokens / asked * questions + self.ready.text.tokens
        return self.pace.estimate(tokens, self.names) + self.record
