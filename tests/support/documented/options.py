"""Commands that are read and not run: whether the command line understands them."""

import re
import shlex
from collections.abc import Iterator

import typer

from rotationzoo.cli.app import COMMANDS, app

_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_MAYBE = re.compile(r'\$\{\w+:\+"\$\w+"\}')  # a word that is there only if a variable is
_SUBSTITUTED = re.compile(r'"?\$\(.*\)"?')
_DATE = re.compile(r'(?<=--published )"\$\{[^}]+\}"')  # a day that the shell cuts from a name


def commands_in(text: str) -> Iterator[list[str]]:
    """The words behind `rotationzoo` in the lines of a script or of a workflow."""
    for line in _DATE.sub("2026-01-31", re.sub(r"\\\n", " ", text)).splitlines():
        for part in re.split(
            r"\s(?:&&|\|\||\||;|>|<)\s", _SUBSTITUTED.sub("WORD", _MAYBE.sub("", line))
        ):
            if start := re.match(r"\s*(?:.* -?-m(?:odule)? )?rotationzoo (.*)", part):
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
    in_block = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            in_block = not in_block
        if not in_block:
            yield from _SPAN.findall(line)


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
