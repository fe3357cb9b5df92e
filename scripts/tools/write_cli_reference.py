"""Every command with its arguments, options, defaults and examples, written into
docs/reference/cli.md.

    python scripts/tools/write_cli_reference.py

The words are those of `--help`: docstrings and options of the functions in `cli`, which are read
through their signatures and not through Typer's internals. `tests/test_site.py` fails where the
page is old.
"""

import inspect
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from typer.models import ArgumentInfo

from rotationzoo.cli.app import COMMANDS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"
BEGIN = "<!-- written by scripts/tools/write_cli_reference.py -->\n"
END = "<!-- end of the commands -->\n"
TYPES = {int: "INTEGER", float: "NUMBER", str: "TEXT", Path: "PATH", datetime: "DAY"}


def listing() -> str:
    """Markdown: a table of the commands, and a section for each."""
    lines = ["| command | what it does |", "|---|---|"]
    for name, command in COMMANDS.items():
        description = paragraphs(command)[0]
        lines.append(f"| [`{name}`](#{name}) | {description} |")
    sections = [section(name, command) for name, command in COMMANDS.items()]
    return "\n".join(lines) + "\n\n" + "\n".join(sections)


def section(name: str, command: Callable[..., None]) -> str:
    """A command: what it does, how it is called, examples, arguments and options."""
    every = parameters(command)
    arguments = [each for each in every if isinstance(each.info, ArgumentInfo)]
    options = [each for each in every if each not in arguments]
    usage = " ".join(["rotationzoo", name, *(each.usage for each in arguments), "[OPTIONS]"])
    told = paragraphs(command)
    examples = [text for text in told if text.startswith("rotationzoo ")]
    parts = [f"## {name}", *(text for text in told if text not in examples)]
    parts.append(f"```text\n{usage}\n```")
    if examples:
        parts.append("\n".join(["```sh", *examples, "```"]))
    for heading, rows in (("argument", arguments), ("option", options)):
        if rows:
            table = [f"| {heading} | what it is | default |", "|---|---|---|"]
            parts.append("\n".join([*table, *(each.row for each in rows)]))
    return "\n\n".join(parts) + "\n"


def paragraphs(command: Callable[..., None]) -> list[str]:
    """Those of a command's docstring, each in one line."""
    told = inspect.getdoc(command) or ""
    return [" ".join(paragraph.split()) for paragraph in told.split("\n\n")]


class Parameter:
    """An argument or an option of a command, which is the default of a parameter."""

    def __init__(self, parameter: inspect.Parameter):
        self.type, self.info, self.name = parameter.annotation, parameter.default, parameter.name
        self.default = self.info.default
        self.required = self.default is ...

    @property
    def usage(self) -> str:
        """The argument in the line that shows how a command is called."""
        several = "..." if get_origin(_without_none(self.type)) is list else ""
        word = (self.info.metavar or self.name.upper()) + several
        return word if self.required else f"[{word}]"

    @property
    def row(self) -> str:
        """The row of a table in Markdown."""
        if isinstance(self.info, ArgumentInfo):
            named = f"`{self.info.metavar or self.name.upper()}`"
        else:
            named = ", ".join(f"`{each}`" for each in self.spellings)
        told = (self.info.help or "").replace("|", "\\|")
        return f"| {named} | {' '.join([told, *self.limits])} | {self.shown_default} |"

    @property
    def spellings(self) -> Iterator[str]:
        """The option as it is typed, with what follows it; a short form comes last."""
        words = list(self.info.param_decls or [])
        if not any(word.startswith("--") for word in words):
            words.insert(0, f"--{self.name.replace('_', '-')}")
        value = self.value
        for word in words:
            for spelling in word.split("/"):
                yield f"{spelling} {value}".strip()

    @property
    def value(self) -> str:
        """What follows the option; nothing for a flag."""
        kind = _without_none(self.type)
        if kind is bool:
            return ""
        if get_origin(kind) is list:
            kind = get_args(kind)[0]
        if get_origin(kind) is Literal:
            return "CHOICE"
        return str(self.info.metavar or TYPES[kind])

    @property
    def limits(self) -> list[str]:
        """Sentences about what an option accepts."""
        kind, sentences = _without_none(self.type), []
        if get_origin(kind) is Literal:
            choices = ", ".join(f"`{choice}`" for choice in get_args(kind))
            sentences.append(f"One of {choices}.")
        if self.info.min is not None:
            sentences.append(f"At least {self.info.min}.")
        if self.info.max is not None:
            sentences.append(f"At most {self.info.max}.")
        return sentences

    @property
    def shown_default(self) -> str:
        """The signature's default; nothing where the command decides, or for a flag."""
        if self.required:
            return "required"
        is_silent = self.default is None or self.default is False or self.default == []
        return "" if is_silent else f"`{self.default}`"


def parameters(command: Callable[..., None]) -> list[Parameter]:
    """Those that the command line offers, in the order of the signature."""
    signature = inspect.signature(command, eval_str=True)
    made = [Parameter(parameter) for parameter in signature.parameters.values()]
    return [parameter for parameter in made if not getattr(parameter.info, "hidden", False)]


def _without_none(kind: Any) -> Any:
    """`X` of `X | None`."""
    if get_origin(kind) in (Union, UnionType):
        return next(each for each in get_args(kind) if each is not type(None))
    return kind


def page(text: str) -> str:
    """The page with the commands of today."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{listing()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
