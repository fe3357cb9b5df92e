"""The decision on an artifact: what its arm keeps of the model's answers, whether it is clearly
better than the rotations that need no data, and what to do.

Questions may be asked in several rounds, with a look at all answers after each. The level is split
evenly over the planned looks (Bonferroni), so that all of them together keep it, whenever a look
ends the questions.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from scipy.special import betaincinv, ndtri, stdtrit

from rotationzoo.artifact.scores import (
    Action,
    Decision,
    ExactTaskRecall,
    Outlook,
    Rival,
    kept_share,
    plain_name,
)
from rotationzoo.evaluation.tasks.prompts import MOST_QUESTIONS
from rotationzoo.evaluation.verdict import LEVEL, Answered, holm, read_correct, sign_flip
from rotationzoo.figures import percent
from rotationzoo.linalg.paired import weighted_mean
from rotationzoo.words import counted

SIMPLEST: dict[Action, str] = {
    "identity": "no rotation",
    "hadamard": "an uncalibrated rotation",
}
"""The rotations that need no data and no calibration, the simplest first, in plain words."""
MARGIN = 0.03  # of all questions, 3 points: a smaller difference is worth no calibration
_POWER = 0.8
_LITTLE = 0.9  # of the answers; if surely fewer are kept, the advice says so
_WEAK = 0.3  # of the questions; if the exact model answers fewer, the advice says so
_FEWEST = 8  # prompts: fewer show nothing by the sign-flip test
_PACE = 16  # questions, to a multiple of which more are asked
_PHRASES: dict[Outlook, str] = {
    "better": "clearly better than",
    "worse": "clearly worse than",
    "same": "within 3 points of",
    "open": "not clearly better than",
}


def decide(
    arm: str,
    arms: Mapping[str, Answered],
    exact: Mapping[str, ExactTaskRecall],
    questions: int,
    looks: int = 1,
) -> Decision:
    """The decision on one of the `arms`, by the answers of all to the same questions, and of the
    `exact` model to every task. `questions`: how many each task and length asks. `looks`: after how
    many rounds a decision may be made, this one included."""
    asked = {task: exact[task] for task in arms[arm]}
    sizes = [size for recall in asked.values() for size in recall.prompts]
    tasks = [len(recall.prompts) for recall in asked.values()]
    level = LEVEL / looks
    right, mine = read_correct(asked), read_correct(arms[arm])
    if not right.any():
        return _undecided(arm, level, was_asked=bool(exact))
    shares = {name: kept_share(asked, given) or 0.0 for name, given in arms.items()}
    given, whole = _add_up(right & mine, sizes), _add_up(right, sizes)
    kept, interval = shares[arm], _kept_interval(shares[arm], given, whole, tasks, level)
    others = {name: read_correct(arms[name]) for name in SIMPLEST if name in arms}
    gains = {name: _add_up(mine.int() - other.int(), sizes) for name, other in others.items()}
    values = holm([sign_flip(gain.int().tolist()) for gain in gains.values()])
    rivals, more = [], 0
    for (name, gain), value in zip(gains.items(), values, strict=True):
        assert value is not None, "the test always gives one"
        rival, prompts = _compare(name, gain, sizes, tasks, value, level)
        rivals.append(rival)
        if rival.outlook == "open":
            more = max(more, _PACE * math.ceil(questions * prompts / len(sizes) / _PACE))
    action = _choose(rivals)
    advice = _advise(action, more, kept, interval[1])
    if (able := right.double().mean().item()) < _WEAK:
        advice += " The model itself answers few: other --tasks may show more."
    wanted = min(more, MOST_QUESTIONS) or None
    better = [rival.name for rival in rivals if rival.outlook == "better"]
    return Decision(
        arm=arm,
        kept=kept,
        interval=interval,
        better_than=better,
        action=action,
        more_questions=wanted if action == "ask" else None,
        level=level,
        rivals=rivals,
        words=[
            f"Without a 2-bit cache, the model answers {percent(able)} of "
            f"{counted(len(right), 'question')}; {plain_name(arm)} keeps {percent(kept)} of these "
            f"answers (95% sure: {' to '.join(map(percent, interval))}).",
            _compare_words(arm, rivals, shares),
            advice,
        ],
    )


def _undecided(arm: str, level: float, was_asked: bool) -> Decision:
    """The decision where no answer of the exact model can be kept."""
    reason, advice = "No question was asked", "Ask some: leave out --tasks none."
    if was_asked:
        reason = "The model itself can do none of the tasks"
        advice = "Ask what it can do: other --tasks, or shorter --lengths."
    words = [
        f"{reason}, so nothing shows what {plain_name(arm)} keeps.",
        f"It is not clearly better than {' or '.join(SIMPLEST.values())}.",
        advice,
    ]
    return Decision(arm=arm, action="nothing" if was_asked else "ask", level=level, words=words)


def _add_up(values: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """The sum of each prompt's values, which are one a question, as float64."""
    return torch.stack([part.sum() for part in values.split(list(sizes))]).double()


def _average(
    values: torch.Tensor, weights: torch.Tensor, tasks: Sequence[int]
) -> tuple[float, float | None]:
    """The weighted mean over prompts, and its standard error by the spread within each task, where
    each has at least two prompts. `tasks`: how many prompts each has, in their order."""
    parts = zip(values.split(list(tasks)), weights.split(list(tasks)), strict=True)
    errors = [(weighted_mean(*part)[1], part[1].sum()) for part in parts if part[1].any()]
    mean, error = weighted_mean(values, weights)
    if all(each is not None for each, _ in errors):
        error = math.hypot(*(each * weight / weights.sum() for each, weight in errors))
    return mean, error


def _kept_interval(
    share: float, kept: torch.Tensor, right: torch.Tensor, tasks: Sequence[int], level: float
) -> list[float]:
    """The interval of the share of right answers that is kept, from both counts of each prompt.

    It is Clopper and Pearson's for as many independent answers as have the standard error over
    prompts (Korn and Graubard 1998), which holds near 100 %, too. Where no prompt differs from
    another, each counts as one answer.
    """
    _, error = _average(kept / right, right, tasks)
    prompts = int((right > 0).sum())
    number = float(prompts)
    if error:
        scale = ndtri(1 - level / 2) / stdtrit(max(1, prompts - len(tasks)), 1 - level / 2)
        number = min(right.sum().item(), share * (1 - share) / error**2) * scale**2
    count = share * number
    low = betaincinv(count, number - count + 1, level / 2) if share > 0 else 0.0
    high = betaincinv(count + 1, number - count, 1 - level / 2) if share < 1 else 1.0
    return [float(low), float(high)]


def _compare(
    name: Action,
    gain: torch.Tensor,
    sizes: Sequence[int],
    tasks: Sequence[int],
    value: float,
    level: float,
) -> tuple[Rival, float]:
    """A rival, compared by the arm's gain in each prompt and the corrected p `value` of the
    sign-flip test; and how many new prompts would settle it with a power of 80 %.

    The interval of the difference is Student's t over prompts, with half a prompt more in favor of
    each (Agresti and Min 2005): without them, prompts of which none differs would have no error.
    It is corrected for the number of rivals.
    """
    weights = torch.tensor(sizes, dtype=torch.float64)
    opposed = torch.tensor([1.0, -1.0], dtype=torch.float64)
    half = weights.mean().expand(2) / 2
    center, error = _average(
        torch.cat([gain / weights, opposed]), torch.cat([weights, half]), [*tasks, 2]
    )
    assert error is not None, "there are at least three"
    alpha = 1 / len(SIMPLEST) / 2
    reach = float(stdtrit(max(1, len(sizes) - len(tasks)), 1 - level * alpha)) * error
    interval = [center - reach, center + reach]
    difference = (gain.sum() / weights.sum()).item()
    outlook: Outlook = "open"
    if value < level:
        outlook = "better" if difference > 0 else "worse"
    elif max(map(abs, interval)) <= MARGIN:
        outlook = "same"
    # Either that there is a difference can be shown, or that it is within the margin.
    quantiles = ndtri(1 - LEVEL * alpha) + ndtri(_POWER)
    ratio = quantiles / max(abs(difference), MARGIN - abs(difference))
    _, spread = _average(gain / weights, weights, tasks)
    variance = 0.25 if spread is None else spread**2 * len(sizes)
    prompts = float(ratio**2 * variance + ratio * math.sqrt(0.5))  # with both halves
    rival = Rival(
        name=name, difference=difference, interval=interval, p_value=value, outlook=outlook
    )
    return rival, max(_FEWEST, prompts)


def _choose(rivals: Sequence[Rival]) -> Action:
    """The better of the rivals that are better, or the simplest that is as good; else the arm, once
    it is shown better than all."""
    if worse := [rival for rival in rivals if rival.outlook == "worse"]:
        return min(worse, key=lambda rival: rival.difference).name
    if same := [rival for rival in rivals if rival.outlook == "same"]:
        return same[0].name
    shown = bool(rivals) and all(rival.outlook == "better" for rival in rivals)
    return "use" if shown else "ask"


def _compare_words(arm: str, rivals: Sequence[Rival], kept: Mapping[str, float]) -> str:
    """How an arm compares, and the shares that its rivals keep, which have nearest codes."""
    name, has_feedback = plain_name(arm), arm.endswith("+feedback")
    if not rivals:
        return f"Not compared with {' or '.join(SIMPLEST.values())}."
    shares = [f"{SIMPLEST[rival.name]} keeps {percent(kept[rival.name])}" for rival in rivals]
    parts = []
    for outlook, phrase in _PHRASES.items():
        names = [SIMPLEST[rival.name] for rival in rivals if rival.outlook == outlook]
        if len(names) > 1:
            names = ["either" if outlook == "open" else "both"]
        parts += [f"{phrase} {each}" for each in names]
    size = "At the same size, rounded one by one" if has_feedback else "At the same size"
    return f"{size}, {' and '.join(shares)}: {name} is {' and '.join(parts)}."


def _advise(action: Action, more: int, kept: float, at_most: float) -> str:
    if action == "hadamard":
        return "Use a Hadamard rotation and save the trouble: it needs no calibration."
    if action == "identity":
        return "Use no rotation and save the trouble: it answers as many."
    if action == "ask" and not more:
        return "Compare it with them."
    if action == "ask":
        return f"To settle it, ask {more:,} new questions of each task."
    if at_most < _LITTLE:
        return f"Use it where 8 bits are too many: {percent(1 - kept)} of the answers are lost."
    if kept < _LITTLE:
        return f"Use it. It may lose more than {percent(1 - _LITTLE)} of the answers."
    return "Use it."
