"""The output of `demo`: what was made, and what the model answers through each cache."""

from typing import Any

from rotationzoo.artifact.measured import Exact, Measured, MeasuredArm, arms_of
from rotationzoo.artifact.store import REPORT, Artifact
from rotationzoo.cache.size import CONTEXT, EXACT_BITS
from rotationzoo.cli.output import Output, say, table
from rotationzoo.words import counted

_BASELINES = {"a Hadamard matrix": "hadamard", "no rotation": "identity"}


def show_demo(out: Output, artifact: Artifact, report: Measured) -> None:
    """Print the answers through the exact cache, with this artifact, and with the baselines.

    `report`: of an evaluation of this artifact alone.
    """
    arms = report.window.arms
    # The last of the artifact's arms writes rows as a cache does that has its factors.
    made = arms_of(arms, artifact.identity)[-1]
    caches = {"exact": _figures(report.exact, float(EXACT_BITS))}
    caches["these rotations"] = _figures(made, made.bits_per_element)
    for words, name in _BASELINES.items():
        caches[words] = _figures(arms[name], arms[name].bits_per_element)
    data = {
        "artifact": str(artifact.folder),
        "page": str(artifact.folder / REPORT),
        "seconds": artifact.manifest.run.seconds,
        "caches": caches,
    }
    out.result(data, str(artifact.folder), lambda: _say_demo(artifact, report, data))


def _figures(measured: Exact | MeasuredArm, bits: float) -> dict[str, Any]:
    recall = measured.all_tasks
    assert recall is not None, "the demo model can do these tasks"
    return {
        "bits_per_element": bits,
        "answered": recall.answered,
        "questions": recall.questions,
        "log_probability": recall.log_probability,
        "perplexity": measured.perplexity,
    }


def _say_demo(artifact: Artifact, report: Measured, data: dict[str, Any]) -> None:
    layers, length = len(artifact.rotations), report.tasks.lengths[0]
    say(
        f"Rotations of the demo model ({counted(layers, 'layer')}), made in "
        f"{data['seconds']:.1f} s: {artifact.folder}"
    )
    rows = []
    for words, figures in data["caches"].items():
        rows.append(
            [
                words,
                f"{figures['bits_per_element']:.1f}",
                f"{figures['answered'] / figures['questions']:.0%}",
                f"{figures['log_probability']:.2f}",
                f"{figures['perplexity']:.3f}",
            ]
        )
    questions = data["caches"]["exact"]["questions"]
    title = f"{counted(questions, 'question')} about statements hidden in {length:,} tokens"
    columns = ["cache", "bits", "answered", "log probability", "perplexity"]
    table(title, columns, rows, apart=True)
    say(
        f"bits: of a cached element at {CONTEXT:,} tokens, exact ones included",
        "log probability: of the right answers, in nats; so few questions show only large "
        "differences",
        "",
        f"The page about it: {data['page']}",
    )
