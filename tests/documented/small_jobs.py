"""The only place where commands of the documentation are made smaller than a reader's.

Commands run as they are printed. What is checked beforehand, such as lengths beside a model's
positions, is checked for the numbers that the page gives. Behind these checks, before text is read
and the model runs, numbers that only make a job slow are cut to those below.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

ROWS, LENGTH = 2, 2560  # more than the 2,176 tokens that configs/Qwen3-8B.yaml keeps exact
JUDGED_ROWS, BASELINES = 1, ("identity", "hadamard")
TASKS, QUESTIONS, PROMPT = 1, 1, 3584  # more than windows of 128/1024 and a chunk of 2,048 tokens
NEW_TOKENS = 8


def shrink() -> None:
    """Make the jobs of this process small."""
    from transformers import GenerationMixin

    from rotationzoo.calibration import calibrate as calibration
    from rotationzoo.cli import push
    from rotationzoo.evaluation import evaluate as evaluation
    from rotationzoo.evaluation import prepare as preparation

    calibration.plan = _with_result(calibration.plan, small_plan)
    preparation.judged_text = _with_result(preparation.judged_text, judged_data)
    evaluation.build_arms = _with_argument(evaluation.build_arms, 2, few_baselines)
    preparation.plan_tasks = _with_argument(preparation.plan_tasks, 0, small_tasks)
    push.check_use = lambda artifact: None  # random weights can do no task
    GenerationMixin.generate = _of_few_tokens(GenerationMixin.generate)


def small_data(data: Any, rows: int = ROWS, longest: int = LENGTH) -> Any:
    length = min(data.length, longest)
    return data.model_copy(update={"length": length, "tokens": min(data.tokens, rows * length)})


def judged_data(data: Any) -> Any:
    return small_data(data, JUDGED_ROWS)


def few_baselines(names: Any) -> Any:
    return [name for name in names if name in BASELINES]


def small_plan(plan: Any) -> Any:
    recipe = plan.job.recipe
    change = {"data": small_data(recipe.data)}
    return replace(plan, job=replace(plan.job, recipe=recipe.model_copy(update=change)))


def small_tasks(settings: Any) -> Any:
    """The first tasks, at the last length, which is the longest on every page."""
    lengths = tuple(min(length, PROMPT) for length in settings.lengths[-1:])
    return replace(settings, names=settings.names[:TASKS], lengths=lengths, questions=QUESTIONS)


def _with_result(function: Callable, change: Callable) -> Callable:
    return wraps(function)(lambda *given, **named: change(function(*given, **named)))


def _with_argument(function: Callable, position: int, change: Callable) -> Callable:
    def changed(*given: Any) -> Any:
        return function(*given[:position], change(given[position]), *given[position + 1 :])

    return wraps(function)(changed)


def _of_few_tokens(generate: Callable) -> Callable:
    def shorter(self: Any, *given: Any, **named: Any) -> Any:
        named["max_new_tokens"] = min(named["max_new_tokens"], NEW_TOKENS)
        return generate(self, *given, **named)

    return wraps(generate)(shorter)
