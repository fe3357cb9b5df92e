"""What `export` prints, and `pull --to`: how to start the engine."""

import shlex
from pathlib import Path

from rotationzoo.cli.output import Output, say, show_lines
from rotationzoo.engines.export import Exported, as_json, launch_line

_SHORT = 80  # columns; a command that is shorter fits on every terminal


def show_export(out: Output, exported: Exported) -> None:
    """The command that starts the engine; in the notes, what the engine does not get."""
    for words in exported.reduced:
        out.note(f"Reduced: {words}")
    out.notes(exported.launch.notes)

    def human() -> None:
        for line in launch_line(exported.launch).splitlines():
            show_lines(*fold_command(line))
        out.note(f"Files: {exported.path}")

    out.result(as_json(exported), str(exported.path), human)


def show_absorbed(out: Output, model: Path, artifact: Path) -> None:
    """`model`: the folder that holds the value rotation of `artifact` in its weights."""

    def human() -> None:
        say(str(model))
        command = f"rotationzoo export {artifact} --to ENGINE --values-absorbed {model}"
        out.note(f"Now export the keys: {command}")

    out.result({"model": str(model)}, str(model), human)


def fold_command(command: str) -> list[str]:
    """A long shell command with one flag per line, so that no terminal breaks it where it cannot be
    copied."""
    try:
        words = shlex.split(command)
    except ValueError:
        words = []
    # What is not a command is left alone: Python, a comment, the variables before a command.
    if len(command) < _SHORT or shlex.join(words) != command:
        return [command]
    parts: list[list[str]] = [[]]
    for word in words:
        if word.startswith("--"):
            parts.append([])
        parts[-1].append(word)
    return " \\\n    ".join(map(shlex.join, parts)).splitlines()
