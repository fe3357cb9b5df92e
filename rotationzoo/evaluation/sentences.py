"""The decision on an artifact in words: what to do and why, the shares of each task, and the other
arms."""

from collections.abc import Mapping

from rotationzoo.artifact import scores
from rotationzoo.artifact.scores import Decision, ExactTaskRecall, plain_name
from rotationzoo.evaluation.decision import FEWEST_ANSWERS, SIMPLEST, Answered
from rotationzoo.words import counted, percent

_WEAK = 0.3  # of the questions of a task; if the exact model answers fewer, the words say so
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
    """The decision with its words and its arm's bits an element, of the `bits` of each arm. All
    else is given as to `decision.decide`."""
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
    """Why no answer of the exact model can be kept."""
    reason, advice = "no question was asked", "Ask some: leave out --tasks none."
    if made.action == "nothing":
        reason = "the model itself can do none of the tasks"
        advice = "Ask what it can do: other --tasks, or shorter --lengths."
    return [f"Undecided: {reason}, so nothing shows what {plain_name(made.arm)} keeps.", advice]


def _say_outcome(made: Decision, answers: int) -> str:
    """What to do, and the share that is kept of the exact model's right `answers`."""
    assert made.interval is not None
    # One more digit, where a rounded end would seem to lie on the floor.
    digits = int(any(percent(end) == percent(made.floor) for end in made.interval))
    low, high = (percent(end, digits) for end in made.interval)
    name, share, number = plain_name(made.arm), percent(made.kept), counted(answers, "answer")
    sure = f"95% sure of each: at least {low}, at most {high}"
    if made.action == "serve":
        sure = f"95% sure: at least {low}"
    elif made.action == "refuse":
        sure = f"95% sure: at most {high}"
    keeps = (
        f"{name} keeps {share} of {number} that the model gives ({sure}); "
        f"at least {100 * made.floor:g}% were to be kept"
    )
    if made.action == "serve":
        return f"Serve it: {keeps}."
    if made.action == "refuse":
        return f"Do not serve it: {keeps}. More bits keep more."
    if made.interval[0] >= made.floor:
        keeps += f", of {FEWEST_ANSWERS} answers or more"
    more = f"{made.more_questions:,} new questions of each task"
    return f"Undecided: {keeps}; {more} would settle it."


def _say_tasks(exact: Mapping[str, ExactTaskRecall], arm: Answered) -> str:
    """The share that is kept of each task, the worst first, and the tasks that show little."""
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
    """The shares that all other arms keep, the best first, and which rivals differ clearly."""
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
