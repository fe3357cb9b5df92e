"""The output of `export` and `pull --to`: how to start the engine."""

import shlex
from pathlib import Path

from rotationzoo.artifact.store import Artifact
from rotationzoo.artifact.weights import model_words
from rotationzoo.cli.output import Output, say, show_lines
from rotationzoo.codec.formats import SIMULATED
from rotationzoo.engines.export import Exported, as_json, launch_line

_SHORT = 80  # columns; a shorter command fits on every terminal


def show_export(out: Output, exported: Exported) -> None:
    """Print the command that starts the engine, with notes on what the export left out."""
    for words in exported.reduced:
        out.note(f"Reduced: {words}")
    out.notes(exported.launch.notes)

    def human() -> None:
        for line in launch_line(exported.launch).splitlines():
            show_lines(*fold_command(line))
        out.note(f"Files: {exported.path}")

    out.result(as_json(exported), str(exported.path), human)


def suggest_measuring(out: Output, artifact: Artifact, engine: str) -> None:
    """Suggest to measure what the format of an engine costs the model, where it can be
    simulated."""
    words = ["evaluate", *model_words(artifact), str(artifact.folder)]
    if engine in SIMULATED:
        words += ["--format", engine]
    out.suggest(*words)


def show_changed_model(out: Output, model: Path, artifact: Path) -> None:
    """Print the folder of the model whose weights carry the value rotation of `artifact`, and the
    command that exports the rest for it."""

    def human() -> None:
        say(str(model))
        out.note("Its engine needs the keys, too")

    out.result({"model": str(model)}, str(model), human)
    out.suggest("export", str(artifact), "--to", "sglang", "--absorbed", str(model))


def fold_command(command: str) -> list[str]:
    """Split a long shell command into one line per flag, joined by backslashes.

    A terminal that wrapped the command itself could break it where it can no longer be copied.
    """
    try:
        words = shlex.split(command)
    except ValueError:
        words = []
    # Leave alone what is not a plain command: Python, comments, variables before a command.
    if len(command) < _SHORT or shlex.join(words) != command:
        return [command]
    parts: list[list[str]] = [[]]
    for word in words:
        if word.startswith("--"):
            parts.append([])
        parts[-1].append(word)
    return " \\\n    ".join(map(shlex.join, parts)).splitlines()
