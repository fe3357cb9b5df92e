"""The front matter of a model card: what the hubs read of it."""

import re
from typing import Any

import yaml

from rotationzoo.artifact.card_results import own_arms
from rotationzoo.artifact.manifest import Calibration, Manifest
from rotationzoo.artifact.results import EvaluationSummary, TaskSummary
from rotationzoo.recipe import SELF

_DATA_SET = re.compile(r"[\w.-]+/[\w.-]+")


def front_matter(manifest: Manifest, title: str) -> str:
    """YAML of what hubs show and search: the base model, license, data sets, and results."""
    front: dict[str, Any] = {
        "library_name": "rotationzoo",
        "tags": ["kv-cache", "2-bit", "rotation"],
    }
    model = manifest.model
    # Only a hub repository may be named as the base model: the hubs link to it.
    if "/" in model.id and model.revision:
        front |= {"base_model": model.id, "base_model_relation": "quantized"}
    if model.license:
        front["license"] = model.license
    if (names := _data_sets(manifest.calibration)) and manifest.imported is None:
        front["datasets"] = names
    evaluation = manifest.metrics.evaluation
    if evaluation is not None:
        front["model-index"] = [{"name": title, "results": _results(evaluation)}]
    return yaml.safe_dump(front, sort_keys=False, allow_unicode=True).strip()


def _data_sets(text: Calibration | None) -> list[str]:
    """The data sets of a hub that calibration read: names such as `owner/name`, and no files."""
    if text is None:
        return []
    place = text.prompts if text.source == SELF else text.source
    return [place] if place and _DATA_SET.fullmatch(place) else []


def _results(evaluation: EvaluationSummary) -> list[dict[str, Any]]:
    """The results as hubs take them: one entry for the answers, one for perplexity."""
    answers, perplexities = [], [_metric("perplexity", "exact cache", evaluation.perplexity)]
    if evaluation.exact_tasks and own_arms(evaluation):
        asked = next(iter(own_arms(evaluation).values())).tasks
        exact = {name: evaluation.exact_tasks[name] for name in asked}
        answers = [_metric("accuracy", "exact cache", _share(exact))] if exact else []
    for name, arm in own_arms(evaluation).items():
        if arm.tasks:
            answers.append(_metric("accuracy", f"2-bit cache, {name}", _share(arm.tasks)))
        perplexity = evaluation.perplexity * (1 + arm.perplexity_increase)
        perplexities.append(_metric("perplexity", f"2-bit cache, {name}", perplexity))
    text = evaluation.text
    results = [_result(text, text, perplexities)]
    if answers:
        results.insert(0, _result(text, f"questions about a context of {text}", answers))
    return results


def _result(text: str, name: str, metrics: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "task": {"type": "text-generation"},
        "dataset": {"type": text, "name": name},
        "metrics": metrics,
    }


def _metric(kind: str, name: str, value: float) -> dict[str, Any]:
    return {"type": kind, "name": name, "value": round(value, 4)}


def _share(tasks: dict[str, TaskSummary]) -> float:
    """The share of all questions that is answered."""
    answered = sum(score.answered for score in tasks.values())
    return answered / sum(score.questions for score in tasks.values())
