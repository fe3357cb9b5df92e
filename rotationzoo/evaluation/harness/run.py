"""Runs the harness' tasks through the exact model and through every combination of arm and
cache."""

from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rotationzoo.errors import as_unavailable
from rotationzoo.evaluation.forward import Trial
from rotationzoo.evaluation.harness.answers import keep_answers
from rotationzoo.evaluation.harness.isolation import SEED, isolated
from rotationzoo.evaluation.harness.measures import TaskMeasures, measure_tasks, pair_with_exact
from rotationzoo.evaluation.harness.tasks import HarnessSettings
from rotationzoo.progress import Progress
from rotationzoo.simulation.layout import CacheLayout
from rotationzoo.simulation.simulated import Simulation
from rotationzoo.words import counted

if TYPE_CHECKING:
    from rotationzoo.evaluation.harness.model import HarnessModel

_MOST = 0.5  # the share of a task's rows that must read something in 2 bits
_RESAMPLES = 1000  # for the standard errors of metrics that have none in closed form


@dataclass(frozen=True)
class HarnessMeasures:
    """What the exact model and every arm answered: task -> metric -> value."""

    version: str
    """The version of lm-evaluation-harness."""
    settings: HarnessSettings
    exact: dict[str, TaskMeasures]
    arms: dict[tuple[CacheLayout, str], dict[str, TaskMeasures]]
    """Keyed by cache and name of the arm."""

    def add_to(self, report: dict[str, Any], trial: Trial) -> None:
        """Add the measures to a report of `evaluate`: to its exact model and to each arm."""
        report["harness"] = {
            "version": self.version,
            "tasks": list(self.settings.tasks),
            "limit": self.settings.limit,
            "chat": self.settings.chat,
        }
        report["exact"]["harness"] = self.exact
        report["notes"] += _notes_of_exact_model(self.exact)
        for cache, window in zip(trial.caches, report["windows"], strict=True):
            for name, arm in window["arms"].items():
                arm["harness"] = self.arms[cache, name]
            report["notes"] += _notes(cache, next(iter(window["arms"].values()))["harness"])


def _notes_of_exact_model(tasks: dict[str, TaskMeasures]) -> list[str]:
    """Notes on metrics that are 0 already for the exact model."""
    notes = []
    for name, measures in tasks.items():
        if nothing := [metric for metric in measures["standard_error"] if measures[metric] == 0]:
            notes.append(
                f"the exact model itself scores 0 on {name} ({', '.join(nothing)}): no arm can "
                "lose anything there, and the scores of arms say nothing about the cache"
            )
    return notes


def _notes(cache: CacheLayout, tasks: dict[str, TaskMeasures]) -> list[str]:
    """Notes on tasks whose questions are mostly too short to read anything in 2 bits."""
    notes = []
    for name, measures in tasks.items():
        share = measures.get("past_windows", 1)
        if share < _MOST:
            notes.append(
                f"{name} says little about this cache: {share:.0%} of its rows are longer than the "
                f"{counted(cache.first_quantized, 'token')} that are read exactly"
            )
    return notes


class HarnessRun:
    """One model and the tasks that it answers again and again, with the same prompts each time."""

    def __init__(self, model: "HarnessModel", tasks: dict[str, Any], settings: HarnessSettings):
        self.model, self.tasks, self.settings = model, tasks, settings

    def answer(self, cache: CacheLayout | None) -> tuple[dict[str, Any], dict[str, TaskMeasures]]:
        """What the harness returns, and the measures made of it. `cache` is the one that is
        simulated; None for the exact model."""
        from lm_eval.evaluator import evaluate

        for task in self.tasks["tasks"].values():
            if task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
            # The examples are drawn anew in each run: the same seed draws the same.
            task.set_fewshot_seed(seed=SEED)
        self.model.rows.clear()
        with isolated(), as_unavailable("the harness fails on its tasks"):
            results = evaluate(
                lm=self.model,
                task_dict=self.tasks,
                limit=self.settings.limit,
                bootstrap_iters=_RESAMPLES,
                apply_chat_template=self.settings.chat,
                fewshot_as_multiturn=self.settings.chat,
            )
        measured = measure_tasks(results, self.model.rows, cache)
        for name, measures in measured.items():
            samples = results["samples"].get(name, [])
            if answers := keep_answers(samples, self.settings.answers):
                measures["answers"] = answers
        return results, measured


def run_harness(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: dict[str, Any],
    settings: HarnessSettings,
    trial: Trial,
    progress: Progress,
) -> HarnessMeasures:
    """Have the exact model and every combination of cache and arm answer the loaded `tasks`.

    Raises `RotationZooError` if the harness fails, for instance in a task's own code.
    """
    import lm_eval

    from rotationzoo.evaluation.harness.model import HarnessModel

    with as_unavailable("the harness cannot use this model and its tokenizer"):
        asked = HarnessModel(model, tokenizer, progress)
    run = HarnessRun(asked, tasks, settings)
    asked.reader = "exact"
    exact_results, exact = run.answer(None)
    asked.reads_simulation = True
    arms: dict[tuple[CacheLayout, str], dict[str, TaskMeasures]] = {}
    for cache, arm in product(trial.caches, trial.arms):
        asked.reader = arm.name
        if trial.through:
            asked.through = trial.through(model, arm, cache)
        simulation = Simulation(arm, cache, trial.geometry, set(trial.layers), trial.sides)
        running = nullcontext() if trial.through else simulation.running(model)
        with running:
            results, measures = run.answer(cache)
        pair_with_exact(measures, results, exact_results)
        arms[cache, arm.name] = measures
    return HarnessMeasures(lm_eval.__version__, settings, exact, arms)
