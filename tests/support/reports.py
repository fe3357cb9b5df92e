"""The report of an evaluation as programs get it: what `evaluate --json` prints; and parts of a
report, to judge."""

from typing import Any

from rotationzoo.artifact.measured import Exact, MeasuredArm
from rotationzoo.artifact.scores import ExactTaskRecall, TaskRecall
from rotationzoo.evaluation import job
from rotationzoo.progress import Progress, silent


def evaluate(
    evaluation: job.Evaluation, progress: Progress = silent, **through: Any
) -> dict[str, Any]:
    return job.evaluate(evaluation, progress, **through).report()


def recall(correct: str, log_probabilities: list[float]) -> TaskRecall:
    """Answers to one task, without their scores: what verdicts are judged by."""
    return TaskRecall.model_construct(correct=correct, log_probabilities=log_probabilities)


def arm(name: str, losses: list[float], **fields: Any) -> MeasuredArm:
    """An arm with the mean losses of its texts alone; a baseline unless told otherwise."""
    about = {"kind": "baseline", "rounding": "nearest", "artifact": None, "pooled": False}
    return MeasuredArm.model_construct(
        **{"name": name, **about, "text_losses": losses, "tasks": {}, "all_tasks": None, **fields}
    )


def exact(tokens: list[int], prompts: dict[str, list[int]] | None = None) -> Exact:
    """The exact model on texts of so many tokens, and how many questions each prompt asks."""
    tasks = {
        name: ExactTaskRecall.model_construct(prompts=sizes)
        for name, sizes in (prompts or {}).items()
    }
    return Exact.model_construct(text_tokens=tokens, tasks=tasks, all_tasks=None)


def summary(
    answered: dict[str, int], artifact: str, exact: dict[str, int], **changes: Any
) -> dict[str, Any]:
    """The summary of an evaluation in a manifest. `answered`: arm -> how many of the 16 questions
    of each task it answers; the first arm is the artifact's, and tasks that the `exact` model
    cannot do (0 answers) are not asked."""
    asked = [task for task, count in exact.items() if count]

    def scores(counts: dict[str, int]) -> dict[str, Any]:
        tasks = {
            task: {"answered": count, "questions": 16, "log_probability": -0.25}
            for task, count in counts.items()
        }
        total = {
            "answered": sum(counts[task] for task in asked),
            "questions": 16 * len(asked),
            "log_probability": -0.25,
            "standard_error": {"answered": 0.01, "log_probability": None},
        }
        return {"tasks": tasks, "all_tasks": total if asked else None}

    arms = {}
    for number, (name, count) in enumerate(answered.items()):
        arms[name] = {
            "name": name,
            "kind": "baseline" if number else "artifact",
            "rounding": "nearest",
            "artifact": None if number else artifact,
            "pooled": False,
            "perplexity": 12.0,
            "perplexity_increase": 0.5,
            "attention_kl": None if number else 0.1,
            "output_error": 0.2,
            "standard_error": {},
            "bits_per_element": 2.5,
            "bits_at_length": 3.5,
            **scores(dict.fromkeys(asked, count)),
        }
    return {
        "text": {"source": "bundled", "fingerprint": "0" * 64, "rows": 2, "length": 2048},
        "tokens": 4096,
        "format": "sglang",
        "prefill_chunk": None,
        "prefill_layout": None,
        "tasks": {
            "names": list(exact), "lengths": [2048], "questions": 16, "first": 64, "recent": 256,
        },
        "sink": 64,
        "recent": 256,
        "arms": arms,
        "verdict": {"texts": 2, "words": ["nothing is clear"]},
        "exact": {"perplexity": 8.0, **scores(exact)},
        **changes,
    }  # fmt: skip
