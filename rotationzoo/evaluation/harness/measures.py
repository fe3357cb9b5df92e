"""What a run of the harness measured: its own metrics, the lengths of answers, and the questions
lost beside the exact model."""

import math
from collections.abc import Iterable
from numbers import Real
from typing import TYPE_CHECKING, Any, TypedDict

from rotationzoo.evaluation.verdict import sign_flip
from rotationzoo.simulation.layout import CacheLayout

if TYPE_CHECKING:
    from rotationzoo.evaluation.harness.model import Row

TaskMeasures = dict[str, Any]
"""The measures of one task: each metric's value under the harness' own name (`acc`, or
`exact_match,strict-match` where a filter has a name), and

* `standard_error`: metric -> the harness' standard error, None where it has none;
* `questions`: how many were asked;
* `row_tokens`: the mean length of what was read for a question (prompt and answer), in tokens;
* `past_windows`: for an arm, the share of these rows that are longer than the exact windows, so
  that something in them is read in 2 bits;
* `answer_tokens`, `truncated`: for generated answers, their mean length in tokens and the share
  that reached the task's largest length without a stop string or an end token;
* `answers`: the first answers in words, a list of `KeptAnswer`, where they are asked for;
* `paired`: for an arm, metric -> `Pairing`, for metrics that are 0 or 1 for each question.
"""


class Pairing(TypedDict):
    """One metric of an arm beside the exact model's, over the same questions."""

    lost: int
    """Questions that the exact model gets right and the arm wrong."""
    gained: int
    """Questions that the arm gets right and the exact model wrong."""
    p_value: float
    """Of McNemar's exact test: the chance of a split at least as uneven if both were as good."""


def measure_tasks(
    results: dict[str, Any], rows: Iterable["Row"], cache: CacheLayout | None
) -> dict[str, TaskMeasures]:
    """The measures of every task and group in what `lm_eval.evaluator.evaluate` returned.

    `rows` is what the model read, through `cache` if there is one.
    """
    rows_of: dict[str, list[Row]] = {}
    for row in rows:
        rows_of.setdefault(row.task, []).append(row)
    measured: dict[str, TaskMeasures] = {}
    for task, metrics in results["results"].items():
        measures = _metrics(metrics)
        if measures == {"standard_error": {}}:
            continue  # a group without a metric of its own
        if counts := results["n-samples"].get(task):
            measures["questions"] = counts["effective"]
        if task in rows_of:
            measures |= _lengths(rows_of[task], cache)
        measured[task] = measures
    return measured


def _lengths(rows: list["Row"], cache: CacheLayout | None) -> TaskMeasures:
    measures: TaskMeasures = {"row_tokens": sum(row.tokens for row in rows) / len(rows)}
    if cache is not None:
        past = sum(row.tokens > cache.first_quantized for row in rows)
        measures["past_windows"] = past / len(rows)
    answers = [row.answer for row in rows if row.answer is not None]
    if answers:
        measures["answer_tokens"] = sum(answers) / len(answers)
        measures["truncated"] = sum(row.truncated for row in rows) / len(answers)
    return measures


def pair_with_exact(
    measured: dict[str, TaskMeasures], results: dict[str, Any], exact_results: dict[str, Any]
) -> None:
    """Add `paired` to the measures of an arm, for every metric that is 0 or 1 for each question."""
    for task, samples in results["samples"].items():
        scores = _scores(samples)
        pairings: dict[str, Pairing] = {}
        for metric, exact in _scores(exact_results["samples"][task]).items():
            arm = scores[metric]
            if {*exact.values(), *arm.values()} <= {0, 1} and exact.keys() == arm.keys():
                pairings[metric] = compare_answers(exact, arm)
        if task in measured:
            measured[task]["paired"] = pairings


def compare_answers(exact: dict[int, float], arm: dict[int, float]) -> Pairing:
    """McNemar's exact test on scores of 0 and 1, by question."""
    lost = sum(exact[question] > arm[question] for question in exact)
    gained = sum(exact[question] < arm[question] for question in exact)
    return {"lost": lost, "gained": gained, "p_value": sign_flip([1] * gained + [-1] * lost)}


def _metrics(metrics: dict[str, Any]) -> TaskMeasures:
    """The harness' `{metric,filter: value, metric_stderr,filter: error}` with its errors apart."""
    values: TaskMeasures = {}
    errors: dict[str, float | None] = {}
    for key, value in metrics.items():
        name, comma, filter = key.rpartition(",")
        # Without a comma it is the task's name or a count. RULER's tasks have a metric for each
        # length, which is -1 for lengths that were not asked.
        if not comma or (name.isdecimal() and value == -1):
            continue
        number = float(value) if _is_number(value) else None
        if name.endswith("_stderr"):
            errors[_label(name.removesuffix("_stderr"), filter)] = number
        else:
            values[_label(name, filter)] = number
    return {**values, "standard_error": {metric: errors.get(metric) for metric in values}}


def _scores(samples: list[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """Metric -> question -> its score, of metrics that are one number for each question."""
    scores: dict[str, dict[int, float]] = {}
    for sample in samples:
        for metric in sample["metrics"]:
            if _is_number(sample[metric]):
                label = _label(metric, sample["filter"])
                scores.setdefault(label, {})[sample["doc_id"]] = float(sample[metric])
    return scores


def _label(metric: str, filter: str) -> str:
    return metric if filter == "none" else f"{metric},{filter}"


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and math.isfinite(value)
