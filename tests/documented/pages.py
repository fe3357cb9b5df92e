"""What pages show to be run: their blocks of shell commands and of Python, as one script."""

import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import typer
from markdown_it import MarkdownIt
from support.places import ROOT

from rotationzoo.cli.app import COMMANDS, app

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHELL, PYTHON = ("sh", "bash"), "python"
_END = "THE_END_OF_THE_BLOCK"  # of a here-document


@dataclass(frozen=True)
class Block:
    """A fenced block, with the number of its first line in the page, counted from 1."""

    language: str
    line: int
    lines: list[str]

    @property
    def is_session(self) -> bool:
        """Whether these are examples with the answers below them, which doctest runs."""
        return any(line.startswith(">>> ") for line in self.lines)


def blocks_of(text: str) -> Iterator[Block]:
    """The fenced blocks of a page. The language is the last word of the fence, so that
    `{code-block} sh` counts, too."""
    for token in MarkdownIt().parse(text):
        if token.type == "fence":
            language = (token.info.split() or [""])[-1]
            yield Block(language, token.map[0] + 2, token.content.splitlines())


def script_of(text: str, not_run: Iterable[str]) -> str:
    """A shell script of what a page shows: every command stands in the line of the page in which
    it is printed. Python with a line that begins as an entry of `not_run` is left out."""
    # Indented blocks are commands, too: cards have them.
    rows = [line if line.startswith("    rotationzoo ") else "" for line in text.splitlines()]
    for block in blocks_of(text):
        first, end = block.line - 1, block.line - 1 + len(block.lines)
        rows[first:end] = [""] * len(block.lines)
        if block.language in SHELL:
            rows[first:end] = block.lines
        elif block.language == PYTHON and not block.is_session:
            if any(line.startswith(tuple(not_run)) for line in block.lines):
                continue
            rows[first - 1] = f"python - <<'{_END}'"
            rows[first:end] = block.lines
            rows[end] = _END
    return "\n".join(rows) + "\n"


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


_MAYBE = re.compile(r'\$\{\w+:\+"\$\w+"\}')  # a word that is there only if a variable is
_SUBSTITUTED = re.compile(r'"?\$\(.*\)"?')
_DATE = re.compile(r'(?<=--published )"\$\{[^}]+\}"')  # a day that the shell cuts from a name


def commands_in(text: str) -> Iterator[list[str]]:
    """The words behind `rotationzoo` in the lines of a script or of a workflow."""
    for line in _DATE.sub("2026-01-31", re.sub(r"\\\n", " ", text)).splitlines():
        for part in re.split(
            r"\s(?:&&|\|\||\||;|>|<)\s", _SUBSTITUTED.sub("WORD", _MAYBE.sub("", line))
        ):
            if start := re.match(r"\s*rotationzoo (.*)", part):
                yield shlex.split(start[1], comments=True)


def understand(words: list[str]) -> None:
    """Parse a whole command. Raises Typer's own error for what it does not understand."""
    group = typer.main.get_command(app)
    context = group.make_context("rotationzoo", list(words))
    _, command, rest = group.resolve_command(context, list(words))
    command.make_context(words[0], rest, parent=context)


def spans_of(text: str) -> Iterator[str]:
    """What stands between backquotes in the text of a page, and names a command of ours first."""
    for span in _spans(text):
        first = span.removeprefix("rotationzoo ").split(" ")[0]
        if span.startswith("rotationzoo ") or (first in COMMANDS and " " in span):
            yield span


def lone_options(text: str) -> Iterator[str]:
    """The options that the text of a page names without a command."""
    for span in _spans(text):
        if option := re.match(r"--[\w-]+", span):
            yield option[0]


def _spans(text: str) -> Iterator[str]:
    for token in MarkdownIt().parse(text):
        for child in token.children or []:
            if child.type == "code_inline":
                yield child.content


def check_options(span: str) -> None:
    """The command exists, and it has the options that stand behind its name."""
    name, *words = span.removeprefix("rotationzoo ").split()
    known = options_of()
    if not name.startswith("-") and name != "COMMAND":
        assert name in COMMANDS, f"there is no command {name} as in {span}"
        known |= options_of(name)
    for word in [name, *words]:
        option = re.match(r"--[\w-]+", word)
        assert not option or option[0] in known, f"{name} has no option {option[0]}"


def options_of(*names: str) -> set[str]:
    """The options of these commands, and those that stand before a command."""
    group = typer.main.get_command(app)
    parameters = [*group.params]
    for name in names:
        parameters += group.commands[name].params
    options = {"--help"}
    for parameter in parameters:
        options |= {*parameter.opts, *parameter.secondary_opts}
    return options
