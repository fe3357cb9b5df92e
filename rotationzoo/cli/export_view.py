"""The output of `export` and `pull --for`: how to start the engine."""

from pathlib import Path

from rotationzoo.cli.output import Output, say, show_lines
from rotationzoo.engines.export import Exported, as_json, launch_line


def show_export(out: Output, exported: Exported) -> None:
    """Print the command that starts the engine, with notes on what the export left out."""
    for words in exported.reduced:
        out.note(f"Lost: {words}")
    out.notes(exported.launch.notes)

    def human() -> None:
        if exported.files:
            out.note(f"Files: {exported.path}")
        out.note("Next: start the engine with")
        show_lines(*launch_line(exported.launch).splitlines())

    out.result(as_json(exported), str(exported.path), human)


def show_changed_model(out: Output, model: Path, artifact: Path) -> None:
    """Print the folder of the model whose weights carry the value rotation of `artifact`, and the
    command that exports the rest for it."""

    def human() -> None:
        say(str(model))
        out.note("Its engine needs the keys, too")

    out.result({"model": str(model)}, str(model), human)
    out.suggest("export", str(artifact), "--for", "sglang", "--absorbed", str(model))
