"""The output of `export` and `pull --for`: how to start the engine."""

from pathlib import Path

from rotationzoo.artifact.store import Artifact
from rotationzoo.artifact.weights import model_words
from rotationzoo.cli.output import Output, say, show_lines
from rotationzoo.engines.export import Exported, as_json, launch_line
from rotationzoo.engines.registry import ENGINES


def show_export(out: Output, exported: Exported) -> None:
    """Print the command that starts the engine, with notes on what the export left out."""
    for words in exported.reduced:
        out.note(f"Reduced: {words}")
    out.notes(exported.launch.notes)

    def human() -> None:
        show_lines(*launch_line(exported.launch).splitlines())
        if exported.files:
            out.note(f"Files: {exported.path}")

    out.result(as_json(exported), str(exported.path), human)


def suggest_measuring(out: Output, artifact: Artifact, engine: str) -> None:
    """Suggest to measure what an engine serves of the artifact, where it can be simulated."""
    served = ["--for", engine] if ENGINES[engine].format else []
    out.suggest("evaluate", *model_words(artifact), str(artifact.folder), *served)


def show_changed_model(out: Output, model: Path, artifact: Path) -> None:
    """Print the folder of the model whose weights carry the value rotation of `artifact`, and the
    command that exports the rest for it."""

    def human() -> None:
        say(str(model))
        out.note("Its engine needs the keys, too")

    out.result({"model": str(model)}, str(model), human)
    out.suggest("export", str(artifact), "--for", "sglang", "--absorbed", str(model))
