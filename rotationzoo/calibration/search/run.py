"""Runs the search over a whole model: it chooses among the variants of a recipe, and rotations
chosen head by head, at the clip ratios that suit each; then it tests the winner.

Everything is judged on calibration text that the statistics have not seen, first by the model's
answers and then by its predictions.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rotationzoo.calibration.checkpoint import Checkpoint
from rotationzoo.calibration.search.answer_loss import AnswerLoss
from rotationzoo.calibration.search.candidate import Candidate
from rotationzoo.calibration.search.clip_ratios import search_clip
from rotationzoo.calibration.search.contest import (
    Contest,
    Finalist,
    choose_sides,
    fit_variants,
    measure,
    pick_finalists,
    pick_winner,
    rank,
    run_test,
)
from rotationzoo.calibration.search.criterion import Criterion, SavedScores
from rotationzoo.calibration.search.layers import next_deadline, search_layers
from rotationzoo.calibration.search.model_divergence import ModelDivergence
from rotationzoo.calibration.search.probes import Trial, try_tasks, write_probes
from rotationzoo.calibration.search.record import describe_search
from rotationzoo.calibration.search.task import SearchTask
from rotationzoo.progress import Progress, silent
from rotationzoo.recipe import Recipe
from rotationzoo.rotations import SIDES, Rotations

_LAYERS_SHARE = 2 / 3  # of the time budget; the search for clip ratios gets the rest


@dataclass(frozen=True)
class SearchResult:
    """What a search chose."""

    recipe: Recipe
    """The recipe that the rotations follow: the variant that won."""
    rotations: Rotations
    record: dict[str, Any]
    """What was tried, chosen and why, for the manifest."""


def search_rotations(
    task: SearchTask,
    deadline: float = math.inf,
    checkpoint: Checkpoint | None = None,
    progress: Progress = silent,
) -> SearchResult:
    """Search for the rotations to serve with.

    1. The variants of the recipe are compared at the recipe's clip ratios.
    2. In the frame of the best one, rotations are chosen head by head, if the recipe says so.
    3. The best candidates get clip ratios of their own, and the best of them wins.
    4. The winner is tested on text and questions that did not choose it. If the recipe's own
       rotations do better there, they are taken.

    `deadline` (`time.monotonic()`) ends learning early, and then the search for clip ratios. It
    never shortens what choices are scored on.
    """
    now = time.monotonic()
    layers_deadline = now + _LAYERS_SHARE * (deadline - now)
    progress("choosing", 0, 0)
    with task.passes.of("answers"):
        trial = try_tasks(task)
    choosing, testing = _make_criteria(task, trial, checkpoint)
    simple, refused = fit_variants(task)
    measure(choosing, simple, progress, "choosing")  # told step by step, and then only read
    frame = pick_winner(choosing, simple)
    by_head: list[Candidate] = []
    layers: dict[str, Any] = {}
    if task.settings.heads:
        in_frame = replace(task, recipe=frame.recipe, baseline=frame.rotations)
        matrices, layers = search_layers(in_frame, layers_deadline, checkpoint, progress)
        by_head = choose_sides(frame, matrices)
        measure(choosing, by_head, progress, "comparing")
    starting = pick_finalists(choosing, simple, by_head)
    finalists = _search_clips(choosing, starting, deadline, progress)
    ended = [finalist.candidate for finalist in finalists]
    winner = pick_winner(choosing, ended)
    others = [candidate for candidate in rank(choosing, ended) if candidate is not winner]
    runner_up = next(iter(others), None)
    test = run_test(testing, winner, simple[0], runner_up, progress)
    contest = Contest(trial, choosing, [*simple, *by_head], refused, finalists, test)
    record = {**describe_search(task, contest), "layers": layers}
    return SearchResult(test.taken.recipe, test.taken.rotations, record)


def _make_criteria(
    task: SearchTask, trial: Trial, checkpoint: Checkpoint | None
) -> tuple[Criterion, Criterion]:
    """The criterion that chooses, and the one that tests, on other text and other questions.

    Both keep their measurements in the checkpoint, so a stopped search does not repeat them.
    """
    settings = task.model, task.geometry, task.cache, task.recipe.group_size
    saved = SavedScores(checkpoint)
    criteria = []
    for part, texts in (("choosing", task.choosing), ("testing", task.testing)):
        answers = AnswerLoss(*settings, write_probes(task, trial.able, part), task.batch)
        with task.passes.of("answers"):
            judge = answers if answers.questions else None
        divergence = ModelDivergence(*settings, texts, task.batch)
        criteria.append(Criterion(judge, divergence, saved, part, task.passes))
    return criteria[0], criteria[1]


def _search_clips(
    criterion: Criterion, candidates: Sequence[Candidate], deadline: float, progress: Progress
) -> list[Finalist]:
    """The candidates at the clip ratios that suit each."""
    finalists = []
    done, total = 0, len(SIDES) * len(candidates)

    def tell() -> None:
        nonlocal done
        done += 1
        progress("trimming", done, total)

    progress("trimming", done, total)
    for number, candidate in enumerate(candidates):
        limit = next_deadline(deadline, len(candidates) - number)
        finalists.append(Finalist(*search_clip(criterion, candidate, limit, tell)))
    return finalists
