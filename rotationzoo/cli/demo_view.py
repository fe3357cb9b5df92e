"""The output of `demo`: the artifact, and how many answers the model keeps through each cache."""

from typing import Any

from rotationzoo.artifact.store import REPORT, Artifact
from rotationzoo.cli.output import Output, say, table
from rotationzoo.simulation.size import CONTEXT
from rotationzoo.words import counted

_BASELINES = {"a Hadamard matrix": "hadamard", "no rotation": "identity"}


def show_demo(out: Output, artifact: Artifact, report: dict[str, Any]) -> None:
    """Print the answers through the exact cache, with this artifact, and with the baselines.

    `report`: of an evaluation of this artifact alone.
    """
    rows = {"exact": {**report["exact"], "bits_per_element": 16.0}}
    # The last of the artifact's own arms writes rows as a cache does that has its factors.
    of_artifact = [name for name in report["arms"] if name not in _BASELINES.values()]
    names = {"these rotations": of_artifact[-1], **_BASELINES}
    rows |= {words: report["arms"][name] for words, name in names.items()}
    data = {
        "artifact": str(artifact.folder),
        "page": str(artifact.folder / REPORT),
        "seconds": artifact.manifest.run.seconds,
        "caches": {words: _figures(measures) for words, measures in rows.items()},
    }
    out.result(data, str(artifact.folder), lambda: _say_demo(artifact, report, data))


def _figures(measures: dict[str, Any]) -> dict[str, Any]:
    asked = measures["all_tasks"]
    return {
        "bits_per_element": measures["bits_per_element"],
        "answered": asked["answered"],
        "questions": asked["questions"],
        "log_probability": asked["log_probability"],
        "perplexity": measures["perplexity"],
    }


def _say_demo(artifact: Artifact, report: dict[str, Any], data: dict[str, Any]) -> None:
    layers, length = len(artifact.rotations), report["tasks"]["lengths"][0]
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
