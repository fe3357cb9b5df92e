"""The output of `demo`: the artifact, and how many answers the model keeps through each cache."""

from typing import Any

from rotationzoo.artifact.measured import Exact, Measured, MeasuredArm, arms_of
from rotationzoo.artifact.store import REPORT, Artifact
from rotationzoo.cli.output import Output, say, table
from rotationzoo.codec.size import CONTEXT, EXACT_BITS
from rotationzoo.words import counted


def show_demo(out: Output, artifact: Artifact, report: Measured) -> None:
    """Print the answers through the exact cache, with this artifact, and with the baselines.

    `report`: of an evaluation of this artifact alone, which has factors for error feedback.
    """
    arms = report.window.arms
    nearest, feedback = arms_of(arms, artifact.identity)
    rows = {
        "these rotations, in most engines": nearest,
        "these rotations, in RotatedCache or serve": feedback,
        "an uncalibrated rotation": arms["hadamard"],
        "no rotation": arms["identity"],
    }
    caches = {"exact": _figures(report.exact, float(EXACT_BITS))}
    for words, arm in rows.items():
        caches[words] = _figures(arm, arm.bits_per_element)
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
        share = figures["answered"] / figures["questions"]
        rows.append([words, f"{figures['bits_per_element']:.1f}", f"{share:.0%}"])
    questions = data["caches"]["exact"]["questions"]
    title = f"{counted(questions, 'question')} about statements hidden in {length:,} tokens"
    table(title, ["cache", "bits", "answered"], rows, apart=True)
    say(
        f"bits: of a cached element at {CONTEXT:,} tokens, exact ones included",
        "RotatedCache and serve round the numbers of a row together, most engines one by one",
        "",
        f"The page about it: {data['page']}",
    )
