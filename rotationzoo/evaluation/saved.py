"""Saving an evaluation with `evaluate --save`: `evaluation.json` in the artifact, and a summary in
its manifest."""

import json
from collections.abc import Sequence
from typing import Any

from rotationzoo.artifact.store import EVALUATION, Artifact
from rotationzoo.artifact.writer import add_files
from rotationzoo.evaluation.arms import feedback_name
from rotationzoo.evaluation.pooled import pooled_name
from rotationzoo.evaluation.report import judge_window

_SUMMARIZED = ("perplexity_increase", "attention_kl", "output_error", "standard_error")
_SCORE = ("answered", "questions", "log_probability")
_OF_ARMS = ("arms", "verdict", "windows")  # the keys of a report that depend on its set of arms


def save_evaluation(
    report: dict[str, Any], artifact: Artifact, arm: str, baselines: Sequence[str]
) -> None:
    """Add `evaluation.json` to an artifact, with only its own arm, those with error feedback and
    with one rotation per layer where there are any, and the baselines."""
    of_artifact = arm, feedback_name(arm), pooled_name(arm)
    shared = {key: value for key, value in report.items() if key not in _OF_ARMS}
    windows = []
    for window in report["windows"]:
        kept = [name for name in (*of_artifact, *baselines) if name in window["arms"]]
        arms = {name: window["arms"][name] for name in kept}
        # Judge again: with fewer arms there are fewer comparisons to correct for.
        verdict = judge_window(arms, [arm], report["exact"])
        windows.append({**window, "arms": arms, "verdict": verdict})
    evaluation = {**shared, "own_arm": arm, "windows": windows}
    content = json.dumps(evaluation, indent=2) + "\n"
    summary = _summarize(report, windows[0])
    add_files(artifact, {EVALUATION: content.encode()}, {"evaluation": summary})


def _summarize(report: dict[str, Any], window: dict[str, Any]) -> dict[str, Any]:
    """The figures of one pair of windows, which the manifest keeps and the card shows."""
    arms = {}
    for name, measures in window["arms"].items():
        summary = {key: measures[key] for key in _SUMMARIZED}
        arms[name] = summary | {"tasks": _summarize_tasks(measures)}
    return {
        "text": report["text"]["source"],
        "tokens": report["tokens"],
        "perplexity": report["exact"]["perplexity"],
        "format": report["format"],
        "sink": window["sink"],
        "recent": window["recent"],
        "prefill_chunk": report["prefill_chunk"],
        "prefill_layout": report["prefill_layout"],
        "task_lengths": list(report["tasks"]["lengths"]),
        "exact_tasks": _summarize_tasks(report["exact"]),
        "arms": arms,
        "texts": window["verdict"]["texts"],
        "verdict": window["verdict"]["words"],
    }


def _summarize_tasks(measures: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What the exact model or an arm answered, task by task."""
    scores = {}
    for task, answered in measures["tasks"].items():
        scores[task] = {key: answered[key] for key in _SCORE}
    return scores
