"""The record of a search for the manifest: what was tried, on what, and what was chosen."""

from typing import Any

from rotationzoo.calibration.search.candidate import Candidate
from rotationzoo.calibration.search.contest import Contest, measure
from rotationzoo.calibration.search.criterion import Criterion, Score
from rotationzoo.calibration.search.probes import POOL, probe_length, probe_seeds
from rotationzoo.calibration.search.task import SearchTask
from rotationzoo.rotations import SIDES

_BY_ANSWERS = (
    "answers to generated questions, hidden in held-out rows of the calibration text; where they "
    "lose the same, predictions on these rows"
)
_BY_PREDICTIONS = "predictions on held-out rows of the calibration text, because {reason}"


def describe_search(task: SearchTask, contest: Contest) -> dict[str, Any]:
    """The parts `model` and `choice` of a manifest's `search`.

    `model` has the clip ratios to serve with, every ratio that was tried for these rotations, and
    what was kept of a choice by head. `choice` has all candidates with their scores, and the test
    of the winner.
    """
    return {"model": _describe_model(contest), "choice": _describe_choice(task, contest)}


def _describe_model(contest: Contest) -> dict[str, Any]:
    taken = contest.test.taken
    score = measure(contest.criterion, [taken])[taken.name]
    tried: dict[str, dict[float, Score]] = {
        side: {ratio: score} for side, ratio in taken.clips.items()
    }
    for finalist in contest.finalists:
        if finalist.candidate.name == taken.name:
            tried = finalist.tried
    record: dict[str, Any] = {}
    for side in SIDES:
        by_clip = {f"{ratio:g}": tried[side][ratio].summary() for ratio in sorted(tried[side])}
        record[side] = {"clip": taken.clips[side], "by_clip": by_clip}
    # The candidates that differ from the one taken only in the sides chosen by head.
    same = [candidate for candidate in contest.candidates if candidate.variant == taken.variant]
    scores = measure(contest.criterion, same)
    by_side = {one.heads: _divergence(scores[one.name]) for one in same}
    return {**record, "by_side": by_side, "kept": taken.heads, "trimmed": _divergence(score)}


def _describe_choice(task: SearchTask, contest: Contest) -> dict[str, Any]:
    test, criterion = contest.test, contest.criterion
    finalists = [finalist.candidate for finalist in contest.finalists]
    # A finalist that kept its clip ratios is one of the candidates.
    candidates = {one.name: one for one in [*contest.candidates, *finalists]}
    runner_up = test.entrants.get("runner_up")
    return {
        "criterion": _criterion_words(task, contest),
        "probes": _describe_probes(task, contest),
        "candidates": _describe_candidates(criterion, list(candidates.values())),
        "refused": dict(contest.refused),
        "winner": test.entrants["winner"].name,
        "runner_up": None if runner_up is None else runner_up.name,
        "baseline": test.entrants["baseline"].name,
        "test": _describe_candidates(test.criterion, list(test.entrants.values())),
        "taken": test.taken.name,
    }


def _criterion_words(task: SearchTask, contest: Contest) -> str:
    """What candidates were judged by, in words."""
    if contest.criterion.answers is not None:
        return _BY_ANSWERS
    if task.tokenizer is None or task.settings.prompts == 0:
        reason = "the recipe asks for no prompts"
    elif contest.trial.answered:
        reason = "the exact model can do none of the recall tasks that were tried"
    else:
        reason = "the rows are too short for the recall tasks"
    return _BY_PREDICTIONS.format(reason=reason)


def _describe_probes(task: SearchTask, contest: Contest) -> dict[str, Any]:
    trial, answers = contest.trial, contest.criterion.answers
    prompts, questions = (0, 0) if answers is None else (len(answers.prompts), answers.questions)
    return {
        "tasks": trial.able,
        "tried": trial.answered,
        "skipped": trial.skipped,
        "prompts": prompts,
        "questions": questions,
        "length": probe_length(task),
        "words": POOL,
        "seeds": probe_seeds(task),
        "rows": {"choosing": len(task.choosing), "testing": len(task.testing)},
    }


def _describe_candidates(criterion: Criterion, candidates: list[Candidate]) -> list[dict[str, Any]]:
    scores = measure(criterion, candidates)
    return [
        {
            "name": candidate.name,
            "composition": candidate.recipe.composition,
            "center_keys": candidate.recipe.center_keys,
            "equalize": candidate.recipe.equalize,
            "heads": candidate.heads,
            "clip": candidate.clips,
            **scores[candidate.name].summary(),
        }
        for candidate in candidates
    ]


def _divergence(score: Score) -> float:
    return score.divergence.mean().item()
