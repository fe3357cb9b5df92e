"""Runs the harness' tasks through the exact model and through every combination of arm and
cache."""

from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rotationzoo.artifact.scores import HarnessRecord, HarnessScore
from rotationzoo.errors import as_unavailable
from rotationzoo.evaluation.forward import Trial
from rotationzoo.evaluation.harness.scores import pair_with_exact, score_tasks
from rotationzoo.evaluation.harness.tasks import SEED, HarnessSettings, isolated
from rotationzoo.progress import Progress
from rotationzoo.simulation.layout import CacheLayout
from rotationzoo.simulation.simulated import Simulation
from rotationzoo.words import counted, percent

if TYPE_CHECKING:
    from rotationzoo.evaluation.harness.model import HarnessModel

_MOST = 0.5  # the share of a task's rows that must read something in 2 bits
_RESAMPLES = 1000  # for the standard errors of metrics that have none in closed form


@dataclass(frozen=True)
class HarnessMeasures:
    """The scores of the exact model and of every arm, by task."""

    record: HarnessRecord
    exact: dict[str, HarnessScore]
    arms: dict[tuple[CacheLayout, str], dict[str, HarnessScore]]
    """Keyed by cache and name of the arm."""

    def notes(self, trial: Trial) -> list[str]:
        """Notes on metrics that are 0 already for the exact model, and on tasks whose questions are
        mostly too short to read anything in 2 bits."""
        notes = []
        for name, score in self.exact.items():
            if nothing := [metric for metric, value in score.metrics.items() if value == 0]:
                notes.append(
                    f"the exact model itself scores 0 on {name} ({', '.join(nothing)}): no arm can "
                    "lose anything there, and the scores of arms say nothing about the cache"
                )
        for cache in trial.caches:
            for name, score in self.arms[cache, trial.arms[0].name].items():
                share = score.past_windows
                if share is not None and share < _MOST:
                    exact = counted(cache.first_quantized, "token")
                    notes.append(
                        f"{name} says little about this cache: {percent(share)} of its rows are "
                        f"longer than the {exact} that are read exactly"
                    )
        return notes


class HarnessRun:
    """One model and the tasks that it answers again and again, with the same prompts each time."""

    def __init__(self, model: "HarnessModel", tasks: dict[str, Any], settings: HarnessSettings):
        self.model, self.tasks, self.settings = model, tasks, settings

    def answer(self, cache: CacheLayout | None) -> tuple[dict[str, Any], dict[str, HarnessScore]]:
        """The harness' own results, and their scores. `cache` is the one that is simulated; None
        for the exact model."""
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
        kept = self.settings.answers
        return results, score_tasks(results, self.model.rows, cache, kept)


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
    arms: dict[tuple[CacheLayout, str], dict[str, HarnessScore]] = {}
    for cache, arm in product(trial.caches, trial.arms):
        asked.reader = arm.name
        if trial.through:
            asked.through = trial.through(model, arm, cache)
        simulation = Simulation(arm, cache, trial.geometry, set(trial.layers), trial.sides)
        running = nullcontext() if trial.through else simulation.running(model)
        with running:
            results, scores = run.answer(cache)
        arms[cache, arm.name] = pair_with_exact(scores, results, exact_results)
    record = HarnessRecord(
        version=lm_eval.__version__,
        tasks=list(settings.tasks),
        limit=settings.limit,
        chat=settings.chat,
    )
    return HarnessMeasures(record, exact, arms)
