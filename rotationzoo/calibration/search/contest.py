"""Which candidates compete for a whole model, and which of them wins."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from rotationzoo.calibration.fit import fit
from rotationzoo.calibration.search.candidate import Candidate
from rotationzoo.calibration.search.choice import BASELINE
from rotationzoo.calibration.search.clip_ratios import Clips
from rotationzoo.calibration.search.criterion import Criterion, Score, find_best, is_better
from rotationzoo.calibration.search.probes import Trial
from rotationzoo.calibration.search.task import SearchTask
from rotationzoo.calibration.search.threads import start_in_threads
from rotationzoo.errors import RotationZooError
from rotationzoo.progress import Progress, silent
from rotationzoo.recipe import Recipe, variants
from rotationzoo.rotations import Rotation, Rotations

_SIMPLE_FINALISTS = 2  # candidates without a choice by head whose clip ratios are searched


def fit_variants(task: SearchTask) -> tuple[list[Candidate], dict[str, str]]:
    """A candidate for every variant of the recipe, the recipe itself first; also return, by name,
    why other variants cannot be made for this model."""
    (first, *others), refused = variants(task.recipe).items(), {}
    candidates = [Candidate(*first, task.baseline)]

    def fit_variant(recipe: Recipe) -> Rotations:
        # Candidates are judged by nearest codes, and the winner gets its factors of error feedback
        # in the end.
        plain = recipe.model_copy(update={"feedback": False})
        return fit(task.statistics, plain, task.geometry)

    fitting = start_in_threads(fit_variant, [recipe for _, recipe in others])
    for (name, recipe), future in zip(others, fitting, strict=True):
        try:
            rotations = future.result()
        except RotationZooError as error:
            refused[name] = str(error)
        else:
            candidates.append(Candidate(name, recipe, rotations))
    return candidates, refused


def choose_sides(
    frame: Candidate, matrices: Mapping[tuple[int, str], torch.Tensor]
) -> list[Candidate]:
    """The candidates that take the matrices (layer, side) -> `[H, D, D]`, chosen head by head, for
    keys, for values, and for both."""

    def replace_matrix(layer: int, side: str, rotation: Rotation) -> Rotation:
        # The factor of error feedback is that of another matrix.
        return replace(rotation, matrix=matrices[layer, side], feedback=None)

    both = frame.rotations.replace(replace_matrix)
    sides = {
        "keys": frame.rotations.with_side("key", both),
        "values": frame.rotations.with_side("value", both),
        "both": both,
    }
    return [replace(frame, rotations=rotations, heads=heads) for heads, rotations in sides.items()]


def rank(criterion: Criterion, candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates, best first."""
    scores = measure(criterion, candidates)
    left = list(candidates)
    ranked = []
    while left:
        ranked.append(left.pop(find_best([scores[candidate.name] for candidate in left])))
    return ranked


def pick_finalists(
    criterion: Criterion, simple: Sequence[Candidate], by_head: Sequence[Candidate]
) -> list[Candidate]:
    """The candidates whose clip ratios are worth a search: the best few simple ones, one that asks
    for no folded weights among them, and the best of those that were chosen head by head.

    Some rotations depend on clipping and others do not, so candidates are compared at their own
    best ratios.
    """
    ranked = rank(criterion, simple)
    finalists = ranked[:_SIMPLE_FINALISTS]
    if all(candidate.recipe.equalize for candidate in finalists):
        finalists += [candidate for candidate in ranked if not candidate.recipe.equalize][:1]
    return [*finalists, *rank(criterion, by_head)[:1]]


def pick_winner(criterion: Criterion, candidates: Sequence[Candidate]) -> Candidate:
    """The best candidate, where simple ones win ties.

    An equalizer asks for folded weights, and a choice by head rests on many small decisions. Either
    must be clearly better than the best candidate without.
    """
    scores = measure(criterion, candidates)
    winner: Candidate | None = None
    for group in _by_simplicity(candidates):
        best = rank(criterion, group)[0]
        if winner is None or is_better(scores[best.name], scores[winner.name]):
            winner = best
    assert winner is not None
    return winner


def _by_simplicity(candidates: Sequence[Candidate]) -> list[list[Candidate]]:
    """The candidates in groups, simplest first."""
    groups: dict[tuple[bool, bool], list[Candidate]] = {}
    for candidate in candidates:
        by_head = candidate.heads != BASELINE
        groups.setdefault((by_head, candidate.recipe.equalize), []).append(candidate)
    return [groups[key] for key in sorted(groups)]


def run_test(
    criterion: Criterion,
    winner: Candidate,
    baseline: Candidate,
    runner_up: Candidate | None,
    progress: Progress = silent,
) -> "FinalTest":
    """Test the winner on text and questions that did not choose it.

    The recipe's own rotations, at its own clip ratios, are taken if they do clearly better there.
    The best of many candidates may owe its place to chance, and then does not keep it.
    """
    entrants = {"winner": winner, "baseline": baseline}
    if runner_up is not None:
        entrants["runner_up"] = runner_up
    scores = measure(criterion, list(entrants.values()), progress, "testing")
    failed = is_better(scores[baseline.name], scores[winner.name])
    return FinalTest(criterion, entrants, taken=baseline if failed else winner)


def measure(
    criterion: Criterion,
    candidates: Sequence[Candidate],
    progress: Progress = silent,
    stage: str = "",
) -> dict[str, Score]:
    """The scores of candidates by their names. What is not measured yet is told as a `stage`."""
    rotations = {candidate.name: candidate.rotations for candidate in candidates}
    return criterion.measure(rotations, progress, stage)


@dataclass(frozen=True)
class Finalist:
    """A candidate at the clip ratios that suit it."""

    candidate: Candidate
    tried: Clips
    """All clip ratios that were tried."""


@dataclass(frozen=True)
class FinalTest:
    """The test of a winner."""

    criterion: Criterion
    entrants: Mapping[str, Candidate]
    """The `winner`, the `baseline` and, if there is one, the `runner_up`."""
    taken: Candidate
    """The candidate to serve with: the winner, or the baseline."""


@dataclass(frozen=True)
class Contest:
    """A search that is over."""

    trial: Trial
    criterion: Criterion
    candidates: Sequence[Candidate]
    """All candidates, at the recipe's clip ratios."""
    refused: Mapping[str, str]
    """Variant -> why it cannot be made for this model."""
    finalists: Sequence[Finalist]
    test: FinalTest
