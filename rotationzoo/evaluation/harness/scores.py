"""The scores of a run of the harness: its own metrics, the lengths of answers, the first answers in
words, and the questions lost against the exact model."""

import math
from collections.abc import Iterable
from numbers import Real
from typing import TYPE_CHECKING, Any

from rotationzoo.artifact.scores import HarnessScore, KeptAnswer, Pairing
from rotationzoo.evaluation.verdict import sign_flip
from rotationzoo.simulation.layout import CacheLayout

if TYPE_CHECKING:
    from rotationzoo.evaluation.harness.model import Row


def score_tasks(
    results: dict[str, Any], rows: Iterable["Row"], cache: CacheLayout | None, answers: int
) -> dict[str, HarnessScore]:
    """The scores of every task and group in what `lm_eval.evaluator.evaluate` returned.

    `rows` is what the model read, through `cache` if there is one, and `answers` how many are kept
    in words.
    """
    rows_of: dict[str, list[Row]] = {}
    for row in rows:
        rows_of.setdefault(row.task, []).append(row)
    scores: dict[str, HarnessScore] = {}
    for task, values in results["results"].items():
        metrics, errors = _metrics(values)
        if not metrics:
            continue  # a group without a metric of its own
        more: dict[str, Any] = {}
        if counts := results["n-samples"].get(task):
            more["questions"] = counts["effective"]
        if task in rows_of:
            more |= _lengths(rows_of[task], cache)
        if kept := _keep_answers(results["samples"].get(task, []), answers):
            more["answers"] = kept
        scores[task] = HarnessScore(metrics=metrics, standard_error=errors, **more)
    return scores


def _lengths(rows: list["Row"], cache: CacheLayout | None) -> dict[str, Any]:
    lengths: dict[str, Any] = {"row_tokens": sum(row.tokens for row in rows) / len(rows)}
    if cache is not None:
        past = sum(row.tokens > cache.first_quantized for row in rows)
        lengths["past_windows"] = past / len(rows)
    answers = [row.answer for row in rows if row.answer is not None]
    if answers:
        lengths["answer_tokens"] = sum(answers) / len(answers)
        lengths["truncated"] = sum(row.truncated for row in rows) / len(answers)
    return lengths


def pair_with_exact(
    scores: dict[str, HarnessScore], results: dict[str, Any], exact_results: dict[str, Any]
) -> dict[str, HarnessScore]:
    """The scores of an arm with `paired`, for every metric that is 0 or 1 for each question."""
    paired = dict(scores)
    for task, samples in results["samples"].items():
        by_metric = _scores(samples)
        pairings: dict[str, Pairing] = {}
        for metric, exact in _scores(exact_results["samples"][task]).items():
            arm = by_metric[metric]
            if {*exact.values(), *arm.values()} <= {0, 1} and exact.keys() == arm.keys():
                pairings[metric] = compare_answers(exact, arm)
        if task in scores:
            paired[task] = scores[task].model_copy(update={"paired": pairings})
    return paired


def compare_answers(exact: dict[int, float], arm: dict[int, float]) -> Pairing:
    """McNemar's exact test on scores of 0 and 1, by question."""
    lost = sum(exact[question] > arm[question] for question in exact)
    gained = sum(exact[question] < arm[question] for question in exact)
    return Pairing(lost=lost, gained=gained, p_value=sign_flip([1] * gained + [-1] * lost))


def _metrics(values: dict[str, Any]) -> tuple[dict[str, float | None], dict[str, float | None]]:
    """The harness' `{metric,filter: value, metric_stderr,filter: error}` as metrics and errors."""
    metrics: dict[str, float | None] = {}
    errors: dict[str, float | None] = {}
    for key, value in values.items():
        name, comma, filter = key.rpartition(",")
        # Without a comma it is the task's name or a count. RULER's tasks have a metric for each
        # length, which is -1 for lengths that were not asked.
        if not comma or (name.isdecimal() and value == -1):
            continue
        number = float(value) if _is_number(value) else None
        if name.endswith("_stderr"):
            errors[_label(name.removesuffix("_stderr"), filter)] = number
        else:
            metrics[_label(name, filter)] = number
    return metrics, {metric: errors.get(metric) for metric in metrics}


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


def _keep_answers(samples: list[dict[str, Any]], count: int) -> list[KeptAnswer]:
    """The first `count` answers among a task's samples, as the harness logs them.

    A task that only scores a given text has no answers.
    """
    kept: dict[int, KeptAnswer] = {}
    for sample in samples:
        question, answer = sample["doc_id"], _answer(sample)
        # A task with several filters has a sample for each, with the same answer.
        if answer is not None and question not in kept and len(kept) < count:
            kept[question] = KeptAnswer(question=question, right=_right(sample), answer=answer)
    return list(kept.values())


def _answer(sample: dict[str, Any]) -> str | None:
    """The text that the model wrote, or the choice that it finds most likely."""
    responses = [repeats[0] for repeats in sample["resps"]]
    if isinstance(responses[0], str):
        return responses[0]
    context, _ = sample["arguments"][0]
    scores = {}
    for (asked, choice), (log_likelihood, _) in zip(sample["arguments"], responses, strict=True):
        if asked == context:  # others, where there are any, score the choices alone
            scores[choice] = log_likelihood
    return None if len(scores) < 2 else str(max(scores, key=lambda choice: scores[choice])).strip()


def _right(sample: dict[str, Any]) -> str:
    """The right answer in words; the harness gives that of a choice as its number."""
    target = sample["target"]
    if isinstance(target, int) and not isinstance(sample["resps"][0][0], str):
        _, target = sample["arguments"][target]
    if isinstance(target, list):
        target = ", ".join(map(str, target))
    return str(target).strip()
