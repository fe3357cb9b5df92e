"""The output of `export` and `pull --for`: how to start the engine."""

from pathlib import Path

from rotationzoo.artifact.store import Artifact
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


def show_changed_model(out: Output, model: Path, artifact: Artifact) -> None:
    """Print the folder of the model whose weights carry the value rotation of an artifact, and the
    command that exports the rest for it. Of latents there is no rest."""
    of_latents = artifact.rotations.has_latents

    def human() -> None:
        say(str(model))
        rest = "Its cache holds rotated latents" if of_latents else "Its engine needs the keys, too"
        out.note(rest)

    out.result({"model": str(model)}, str(model), human)
    if not of_latents:
        out.suggest("export", str(artifact.folder), "--for", "sglang", "--absorbed", str(model))
