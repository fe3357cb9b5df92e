"""The decision whether an artifact may be served: whether its arm surely keeps the share of the
model's answers that is required.

The share is either at least the floor or below it, so only one of the two verdicts can be wrong.
Each is a one-sided test at the level. Questions may be asked in several rounds, with a look at all
answers after each. Each look spends a part of the level, and all looks together keep it.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from scipy.special import betaincinv, ndtri, stdtrit

from rotationzoo.artifact import scores
from rotationzoo.artifact.scores import ALL_ELSE, Decision, ExactTaskRecall, plain_name
from rotationzoo.evaluation.tasks.prompts import MOST_QUESTIONS
from rotationzoo.linalg.paired import holm, sign_flip, weighted_mean
from rotationzoo.words import counted, percent

LEVEL = 0.05  # the chance of a wrong verdict over all looks, or of a false finding in all tests
Answered = Mapping[str, scores.TaskRecall]
"""The answers of an arm by task. All arms answer the same tasks in the same order, but those that
decide nothing may be asked only the first questions of each task and length."""
FEWEST_ANSWERS = 100  # right answers of the exact model, which a verdict to serve needs
# The rotations that need no data, the simplest first.
SIMPLEST: dict[scores.DataFree, str] = {
    "identity": "no rotation",
    "hadamard": "a Hadamard matrix rounded one by one and uncentered",
    ALL_ELSE: "a Hadamard matrix with all else the same",
}
_MARGIN = 0.03  # a difference in the share of answers below 3 points is not worth a calibration
_POWER = 0.8
_ROOTS = (torch.arange(40, dtype=torch.float64) + 0.5) / 40
_CORRELATIONS = _ROOTS.square()  # of answers in a prompt, with smaller steps near zero
_SHARES = torch.linspace(-6, 6, 50, dtype=torch.float64).sigmoid()[:, None]  # even in log odds
_PRIOR = 8  # the prior of a correlation c is (1 - c)^8, Beta(1, 9), whose mean is 0.1
_QUANTILES = torch.tensor([0.92, 0.6], dtype=torch.float64)  # of a correlation: decide, and plan
_STEP = 16  # further questions are a multiple of it


@dataclass(frozen=True)
class Rule:
    """What an artifact must show."""

    floor: float = scores.FLOOR  # the share of the exact model's right answers to keep
    level: float = LEVEL  # the chance that this look ends in a wrong verdict


def spend_level(questions: int, looks: Sequence[int]) -> float:
    """The part of `LEVEL` that the look after `questions` questions spends: the nth look spends n
    times as much as the first (weighted Bonferroni), because late looks decide the hard cases."""
    return LEVEL * (1 + bisect_left(looks, questions)) / sum(range(1, len(looks) + 1))


@dataclass(frozen=True)
class _Kept:
    """The share that an arm keeps of the exact model's right answers."""

    share: float
    answers: int  # right ones of the exact model
    independent: float  # effective number of answers by the upper bound on the correlation: decides
    likely: float  # the same by the likely correlation: plans how many more to ask

    def interval(self, level: float) -> list[float]:
        """The bounds of the share, each missed with a chance of `level`: those of Clopper and
        Pearson for the effective number (Korn and Graubard 1998), which also hold near 100 %."""
        number = self.independent
        count = self.share * number
        low = betaincinv(count, number - count + 1, level) if count > 0 else 0.0
        high = betaincinv(count + 1, number - count, 1 - level) if self.share < 1 else 1.0
        return [float(low), float(high)]

    def act(self, rule: Rule) -> scores.Action:
        low, high = self.interval(rule.level)
        if low >= rule.floor and self.answers >= FEWEST_ANSWERS:
            return "serve"
        return "refuse" if high < rule.floor else "ask"

    def settles(self, times: float, floor: float) -> bool:
        """Whether `times` as many new questions are likely to settle it in one look."""
        independent, answers = self.likely * times, int(self.answers * times)
        reach = ndtri(_POWER) * math.sqrt(self.share * (1 - self.share) / independent)
        sign = 1 if self.share < floor else -1
        share = min(1.0, max(0.0, self.share + sign * reach))
        new = _Kept(share, answers, independent, independent)
        return answers >= FEWEST_ANSWERS and new.act(Rule(floor)) != "ask"


def decide(
    arm: str,
    arms: Mapping[str, Answered],
    exact: Mapping[str, ExactTaskRecall],
    questions: int,
    rule: Rule,
) -> Decision:
    """The decision on one of the `arms`, without words, by the answers of all of them and of the
    `exact` model to the same `questions` of each task and length. Other arms may have been asked
    only the first questions."""
    asked = {task: exact[task] for task in arms[arm]}
    right, mine = read_correct(asked), read_correct(arms[arm])
    if not right.any():
        action: scores.Action = "nothing" if exact else "ask"
        return Decision(arm=arm, floor=rule.floor, action=action, level=rule.level, words=[])
    sizes = [size for recall in asked.values() for size in recall.prompts]
    tasks = [len(recall.prompts) for recall in asked.values()]
    kept = _measure_kept(_add_up(right & mine, sizes), _add_up(right, sizes), tasks)
    # An arm with transform coding is compared with the matrix that has it too.
    has_twin = ALL_ELSE in arms and arm.endswith("+transform")
    unfair = "hadamard" if has_twin else ALL_ELSE
    others = {name: arms[name] for name in SIMPLEST if name in arms and name != unfair}
    action = kept.act(rule)
    return Decision(
        arm=arm,
        kept=kept.share,
        interval=kept.interval(rule.level),
        floor=rule.floor,
        action=action,
        more_questions=_count_more(kept, questions, rule.floor) if action == "ask" else None,
        level=rule.level,
        rivals=_compare_rivals(arms[arm], others, sizes, tasks),
        words=[],
    )


def read_correct(answered: Answered) -> torch.Tensor:
    """Which answers are right, boolean `[questions]`, task after task."""
    digits = "".join(recall.correct for recall in answered.values())
    return torch.tensor([digit == "1" for digit in digits])


def _count_asked(answered: Answered) -> list[int]:
    """The questions of each task and length."""
    return [length.questions for recall in answered.values() for length in recall.by_length]


def _count_more(kept: _Kept, questions: int, floor: float) -> int:
    """New questions of each task and length that settle it, in steps of `_STEP`."""
    steps = range(_STEP, MOST_QUESTIONS + 1, _STEP)
    place = bisect_left(steps, True, key=lambda count: kept.settles(count / questions, floor))
    return steps[min(place, len(steps) - 1)]


def _add_up(values: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """The sum over each prompt of values of questions, as float64."""
    return torch.stack([part.sum() for part in values.split(list(sizes))]).double()


def _measure_kept(given: torch.Tensor, right: torch.Tensor, tasks: Sequence[int]) -> _Kept:
    """What is kept, from the numbers of kept and of right answers in each prompt, `[prompts]`. The
    design effect (Kish 1965) of their correlation gives the effective number of answers."""
    answers = right.sum().item()
    others = (right.square().sum() / right.sum()).item() - 1  # other answers in the same prompt
    numbers = answers / (1 + bound_correlations(given, right, tasks) * others)
    return _Kept(given.sum().item() / answers, int(answers), *numbers.tolist())


def bound_correlations(
    given: torch.Tensor, right: torch.Tensor, tasks: Sequence[int]
) -> torch.Tensor:
    """Bounds `[..., 2]` on the intraclass correlation of the answers in a prompt, one for all
    tasks: the `_QUANTILES` of its posterior, by beta-binomial numbers `[..., prompts]` of kept
    answers among the right ones. The prior of a task's share is flat in log odds."""
    ranks = torch.arange(int(right.max()))[:, None]
    steps = ranks[..., None] * _CORRELATIONS / (1 - _CORRELATIONS)
    density = _PRIOR * (-_CORRELATIONS).log1p() + _ROOTS.log()
    for kept, all_ in zip(given.split(list(tasks), -1), right.split(list(tasks), -1), strict=True):
        likelihood = torch.zeros(())
        # The chance of each answer depends on those before it in its prompt (Polya's urn).
        urn = (kept, _SHARES, 1), (all_ - kept, 1 - _SHARES, 1), (all_, torch.ones(1, 1), -1)
        for values, start, sign in urn:
            number = (values[..., None, :] > ranks).sum(-1).double()
            terms = (start + steps).log().expand(-1, len(_SHARES), -1)
            likelihood = likelihood + sign * torch.tensordot(number, terms, 1)
        density = density + likelihood.logsumexp(-2)
    below = density.softmax(-1).cumsum(-1)
    return _CORRELATIONS[(below[..., None] < _QUANTILES).sum(-2)]


def _compare_rivals(
    mine: Answered, others: Mapping[scores.DataFree, Answered], sizes: list[int], tasks: list[int]
) -> list[scores.Rival]:
    """The comparison with each rival: a sign-flip test on the prompts that both were asked, to
    which no look adds, with p values corrected for the number of rivals (Holm 1979)."""
    given, pairs, rivals = read_correct(mine), list[list[torch.Tensor]](), list[scores.Rival]()
    for other in others.values():
        counts = zip(_count_asked(mine), _count_asked(other), strict=True)
        both = torch.cat([torch.arange(all_) < first for all_, first in counts])
        gain = both.int().masked_scatter(both, given[both].int() - read_correct(other).int())
        pairs.append([_add_up(each, sizes) for each in (gain, both)])
    values = holm([sign_flip(gain.int().tolist()) for gain, _ in pairs])
    for name, (gain, weights), value in zip(others, pairs, values, strict=True):
        interval = _interval_of(gain, weights, tasks, LEVEL / len(others))
        difference = (gain.sum() / weights.sum()).item()
        outlook: scores.Outlook = "open"
        if value < LEVEL:
            outlook = "better" if difference > 0 else "worse"
        elif max(map(abs, interval)) <= _MARGIN:
            outlook = "same"
        found = scores.Rival(
            name=name, difference=difference, interval=interval, p_value=value, outlook=outlook
        )
        rivals.append(found)
    return rivals


def _interval_of(
    gain: torch.Tensor, weights: torch.Tensor, tasks: list[int], level: float
) -> list[float]:
    """The interval of the difference of shares: Student's t over prompts, with half a prompt added
    in favor of each (Agresti and Min 2005), which keeps the error above zero."""
    asked = weights[weights > 0]
    values = torch.cat([gain / weights, torch.tensor([1.0, -1.0], dtype=torch.float64)])
    weights, sizes = torch.cat([weights, asked.mean().expand(2) / 2]), [*tasks, 2]
    center, error = weighted_mean(values, weights)
    assert error is not None, "there are at least three prompts"
    # By the spread within each task, if each has two prompts.
    parts = zip(values.split(sizes), weights.split(sizes), strict=True)
    errors = [(weighted_mean(*part)[1], part[1].sum()) for part in parts if part[1].any()]
    if all(each is not None for each, _ in errors):
        error = math.hypot(*(each * weight / weights.sum() for each, weight in errors))
    reach = float(stdtrit(max(1, len(asked) - len(tasks)), 1 - level / 2)) * error
    return [center - reach, center + reach]


# ---- the decision in words


_WEAK = 0.3  # a task shows little if the exact model answers a smaller share of its questions
_NAMES: dict[str, str] = {"random": "a random matrix rounded one by one", **dict(SIMPLEST.items())}
_VARIANTS = {
    "": "the same rounded one by one",
    "+transform": "the same with transform coding",
    "+pooled": "the same with one rotation per layer",
}
_PHRASES: dict[scores.Outlook, str] = {
    "better": "clearly better than",
    "worse": "clearly worse than",
    "same": "within 3 points of",
}


def put_into_words(
    made: Decision,
    arms: Mapping[str, Answered],
    exact: Mapping[str, ExactTaskRecall],
    bits: Mapping[str, float] | None = None,
) -> Decision:
    """The decision with its words, and with the bits per element of its arm."""
    made = made.model_copy(update={"bits": (bits or {}).get(made.arm)})
    asked = {task: exact[task] for task in arms[made.arm]}
    if made.kept is None:
        words = _say_nothing(made)
    else:
        shares = {name: scores.kept_share(asked, answered) for name, answered in arms.items()}
        words = [
            _say_outcome(made, sum(recall.correct.count("1") for recall in asked.values())),
            _say_tasks(asked, arms[made.arm]),
            _say_others(made, shares, bits or {}),
        ]
    return made.model_copy(update={"words": [line for line in words if line]})


def _say_nothing(made: Decision) -> list[str]:
    """Why there is no answer that could be kept."""
    reason, advice = "no question was asked", "Ask some: leave out --tasks none."
    if made.action == "nothing":
        reason = "the model itself can do none of the tasks"
        advice = "Ask what it can do: other --tasks, or shorter --lengths."
    return [f"Undecided: {reason}, so nothing shows what {plain_name(made.arm)} keeps.", advice]


def _say_outcome(made: Decision, answers: int) -> str:
    """What to do, and the share that is kept of the exact model's right `answers`."""
    assert made.interval is not None
    # With one more digit where a rounded bound would look equal to the floor.
    digits = int(any(percent(end) == percent(made.floor) for end in made.interval))
    low, high = (percent(end, digits) for end in made.interval)
    name, share, number = plain_name(made.arm), percent(made.kept), counted(answers, "answer")
    lead, sure, advice = "Undecided", f" of each: at least {low}, at most {high}", ""
    if made.action == "serve":
        lead, sure = "Serve it", f": at least {low}"
    elif made.action == "refuse":
        lead, sure, advice = "Do not serve it", f": at most {high}", " More bits keep more."
    keeps = f"{name} keeps {share} of {number} that the model gives (95% sure{sure})"
    line = f"{lead}: {keeps}; at least {100 * made.floor:g}% were to be kept"
    if made.action != "ask":
        return f"{line}.{advice}"
    if made.interval[0] >= made.floor:
        line += f", of {FEWEST_ANSWERS} answers or more"
    return f"{line}; {made.more_questions:,} new questions of each task would settle it."


def _say_tasks(exact: Mapping[str, ExactTaskRecall], arm: Answered) -> str:
    """The share that is kept of each task, lowest first, and the tasks that show little."""
    shares, weak = list[tuple[float, str]](), list[str]()
    for task, recall in exact.items():
        answers, asked = recall.correct.count("1"), len(recall.correct)
        share = scores.kept_share({task: recall}, {task: arm[task]})
        if share is not None:
            shares.append((share, f"{task} {percent(share)} of {answers}"))
        if answers < _WEAK * asked:
            weak.append(f"{answers} of {asked} {task} questions")
    words = f"By task: {', '.join(text for _, text in sorted(shares))}."
    if weak:
        words += f" The model itself answers {' and '.join(weak)}: they show little."
    return words


def _say_others(
    made: Decision, shares: Mapping[str, float | None], bits: Mapping[str, float]
) -> str:
    """The shares that all other arms keep, highest first, and which rivals differ clearly."""
    plain, parts = plain_name(made.arm), list[str]()
    titles = _NAMES | {plain + ending: title for ending, title in _VARIANTS.items()}
    others = [(share, name) for name, share in shares.items() if name != made.arm]
    known = [(share, name) for share, name in others if share is not None]
    for share, name in sorted(known, key=lambda each: -each[0]):
        verb, unit = ("", "") if parts else (" keeps", " bits")
        size = f" ({bits[name]:.1f}{unit})" if name in bits else ""
        parts.append(f"{titles.get(name, name)}{verb} {percent(share)}{size}")
    if not parts:
        return ""
    found = []
    for outlook, phrase in _PHRASES.items():
        names = [SIMPLEST[rival.name] for rival in made.rivals if rival.outlook == outlook]
        if names:
            found.append(f"{phrase} {' and '.join(names)}")
    own = f" ({plain}: {made.bits:.1f} bits)" if made.bits is not None else ""
    ending = f"; {plain} is {', and '.join(found)}" if found else ""
    return f"In their own bytes{own}: {', '.join(parts)}{ending}."
