"""The fewest bits that keep enough: budgets of one artifact, which are asked the same questions.

Budgets are tested one by one, each until it is decided: from the middle down, or if the middle may
not be served, from the top down. Each direction is a fixed sequence of tests, which stops at the
first budget that may not be served, and has half of the level. So a budget that keeps too little is
chosen no more often than a single decision is wrong, however many are tested.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from rotationzoo.artifact.scores import Decision, plain_name
from rotationzoo.artifact.store import Artifact
from rotationzoo.budget import Budget
from rotationzoo.calibration.soundness import write_sound_artifact
from rotationzoo.codec.bit_allocation import spend_bits
from rotationzoo.errors import UsageError
from rotationzoo.recipe.loading import with_budget
from rotationzoo.words import percent

RUNGS = (2.0, 2.25, 2.5, 3.0, 3.5, 4.0)  # bits per element
_OUTCOMES = {"serve": "enough", "refuse": "too little", "ask": "undecided", "nothing": "undecided"}


def find_rungs(folders: Sequence[Path]) -> tuple[Budget, ...]:
    """The budgets to choose from, fewest bits first; none where all layers have the same bits."""
    if len(folders) != 1:
        raise UsageError("--fewest-bits is for a single artifact", "give one folder")
    artifact = Artifact.open(folders[0])
    own = artifact.recipe.budget
    if not artifact.rotations.has_budget or own.bits is None:
        return ()
    return tuple(Budget(bits) for bits in sorted({*RUNGS, own.bits}))


def ask_rungs(names: Sequence[str], ask: Callable[[str], Decision]) -> list[Decision]:
    """The decisions on the rungs that are asked, of all `names`, fewest bits first: from the middle
    down while each may be served, or else from the top down to the middle."""
    middle, made = len(names) // 2, dict[str, Decision]()
    for downwards in (names[middle::-1], names[:middle:-1]):
        for name in downwards:
            made[name] = ask(name)
            if made[name].action != "serve":
                break
        if made[names[middle]].action == "serve":
            break
    return [made[name] for name in names if name in made]


def choose_rung(decisions: Sequence[Decision]) -> Decision:
    """The decision on the fewest bits that may be served, or else on the most bits asked."""
    return next((each for each in decisions if each.action == "serve"), decisions[-1])


def describe_rungs(decisions: Sequence[Decision]) -> list[str]:
    """A sentence on what each budget kept; nothing if no answer could be kept."""
    parts = []
    for each in decisions:
        if each.kept is not None and each.interval is not None:
            low, high = map(percent, each.interval)
            kept = f"{percent(each.kept)} ({low} to {high})"
            parts.append(f"{plain_name(each.arm)} keeps {kept}, {_OUTCOMES[each.action]}")
    return ["; ".join(parts)] if parts else []


def write_rung(artifact: Artifact, budget: Budget, name: str) -> Artifact:
    """The artifact that a calibration with this budget makes, written next to the given one, whose
    costs allocate the bits. Raises `RotationZooError` if it cannot be written."""
    # Without the evenness of an engine, which spends the same bits on all layers by itself.
    budget = Budget(**asdict(budget))
    if budget == artifact.recipe.budget:
        return artifact
    recipe = with_budget(artifact.recipe, budget)
    rotations = spend_bits(artifact.rotations, budget)
    changes = {
        "recipe": recipe.published(),
        "recipe_sha256": recipe.hash,
        "identity": {**artifact.content["identity"], "recipe": recipe.hash},
        "metrics": {"orthogonality_error": rotations.orthogonality_error},
    }
    content = {**artifact.content, **changes}
    del content["schema"], content["files"]
    folder = artifact.folder.with_name(name)
    return write_sound_artifact(folder, rotations, artifact.statistics, content, "calibrate again")
