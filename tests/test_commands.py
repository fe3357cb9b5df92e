"""The quick start runs as it is printed, and every command that pages and workflows show is one
that the command line understands."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from support.command_line import succeeded
from support.places import ROOT

from rotationzoo.cli.app import app

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
SHOWN = [*PAGES, DOCS / "fleet.yml", *sorted((ROOT / ".github" / "workflows").glob("*.yml"))]
SHELL = re.compile(r"^```(?:\{code-block\} )?(?:sh|bash)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHORTER = {"evaluate": "--minutes 1"}
GROUP = typer.main.get_command(app)


def commands_in(path: Path) -> Iterator[list[str]]:
    """The words behind `rotationzoo` in the blocks of a page, or in the lines of a workflow."""
    text = path.read_text("utf-8")
    script = "\n".join(SHELL.findall(text)) if path.suffix == ".md" else text
    script = re.sub(r"\\\n", " ", script)
    script = re.sub(r'\$\{\w+:\+"\$\w+"\}', "", script)  # a word that only a variable brings
    script = re.sub(r'(?<=--published )"\$\{[^}]+\}"', "2026-01-31", script)
    for line in re.sub(r'"?\$\(.*\)"?', "WORD", script).splitlines():
        for part in re.split(r"\s(?:&&|\|\||\||;|>|<)\s", line):
            if start := re.match(r"\s*rotationzoo (.*)", part):
                yield shlex.split(start[1], comments=True)


def understand(words: list[str]) -> None:
    """Parse a whole command. Raises Typer's own error for what it does not understand."""
    context = GROUP.make_context("rotationzoo", list(words))
    _, command, rest = GROUP.resolve_command(context, list(words))
    command.make_context(words[0], rest, parent=context)


@pytest.mark.parametrize("path", SHOWN, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_commands_are_understood(path):
    for words in commands_in(path):
        understand(words)


@pytest.mark.thorough
def test_the_quick_start(inside):
    commands = [words for words in commands_in(DOCS / "quickstart.md") if "demo" in " ".join(words)]
    run = [words[0] for words in commands]
    assert run == ["demo", "calibrate", *["generate"] * 3, "evaluate", "report", "export"]
    for words in commands[1:]:  # the first is what `make demo` runs
        succeeded(inside(*words, *SHORTER.get(words[0], "").split()))
