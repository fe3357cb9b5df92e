"""Every command with its arguments, options, defaults and examples, written into
docs/reference/cli.md.

    python scripts/tools/write_cli_reference.py

The words are those of `--help`: docstrings and options of the functions in `cli`, read from their
signatures and not from Typer's internals. `tests/test_site.py` fails if the page is outdated.
"""

import inspect
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from typer.models import ArgumentInfo

from rotationzoo.cli.app import COMMANDS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"
BEGIN = "<!-- written by scripts/tools/write_cli_reference.py -->\n"
END = "<!-- end of the commands -->\n"
SHARED = 2  # an option that this many commands share is described once
TYPES = {int: "INTEGER", float: "NUMBER", str: "TEXT", Path: "PATH", datetime: "DAY"}


def listing() -> str:
    """Markdown: the shared options, and a section for each command."""
    every = {name: parameters(command) for name, command in COMMANDS.items()}
    counted = Counter(each.item for found in every.values() for each in found)
    shared = {item: None for item, count in counted.items() if count >= SHARED}
    of_all = {item for item, count in counted.items() if count == len(COMMANDS)}
    parts = ["\n".join(["## Shared options\n", *shared]) + "\n"]
    for name, command in COMMANDS.items():
        own = [each for each in every[name] if each.item not in shared]
        named = shared.keys() - of_all
        others = [each for each in every[name] if each.item in named and not each.is_argument]
        parts.append(section(name, command, own, others))
    return "\n".join(parts)


def section(
    name: str,
    command: Callable[..., None],
    own: list["Parameter"],
    shared: list["Parameter"],
) -> str:
    """A command: its description, usage, examples and own parameters, and the names of those that
    it shares with other commands."""
    arguments = [each for each in parameters(command) if each.is_argument]
    usage = " ".join(["rotationzoo", name, *(each.usage for each in arguments), "[OPTIONS]"])
    told = paragraphs(command)
    examples = [text for text in told if text.startswith("rotationzoo ")]
    parts = [f"## {name}", *(text for text in told if text not in examples)]
    parts.append(f"```text\n{usage}\n```")
    if examples:
        parts.append("\n".join(["```sh", *examples, "```"]))
    if own:
        parts.append("\n".join(each.item for each in own))
    if shared:
        names = ", ".join(f"`{each.shortest}`" for each in shared)
        parts.append(f"[Shared](#shared-options): {names}.")
    return "\n\n".join(parts) + "\n"


def paragraphs(command: Callable[..., None]) -> list[str]:
    """The examples of a command's docstring, each in one line."""
    told = inspect.getdoc(command) or ""
    return [" ".join(paragraph.split()) for paragraph in told.split("\n\n")]


class Parameter:
    """An argument or an option of a command, which is the default of a parameter."""

    def __init__(self, parameter: inspect.Parameter):
        self.type, self.info, self.name = parameter.annotation, parameter.default, parameter.name
        self.default = self.info.default
        self.required = self.default is ...

    @property
    def is_argument(self) -> bool:
        return isinstance(self.info, ArgumentInfo)

    @property
    def shortest(self) -> str:
        """The name alone, without a value."""
        return self.item.split("`")[1].split(" ")[0]

    @property
    def usage(self) -> str:
        """The argument in the line that shows how a command is called."""
        several = "..." if get_origin(_without_none(self.type)) is list else ""
        word = (self.info.metavar or self.name.upper()) + several
        return word if self.required else f"[{word}]"

    @property
    def item(self) -> str:
        """The item of a list in Markdown."""
        if self.is_argument:
            named = f"`{self.info.metavar or self.name.upper()}`"
        else:
            named = ", ".join(f"`{each}`" for each in self.spellings)
        sentences = [self.info.help or "", *self.limits, *self.default_sentence]
        return f"* {named}: {' '.join(sentences)}"

    @property
    def spellings(self) -> list[str]:
        """The option as it is typed; a short form comes last, and then the value."""
        words = list(self.info.param_decls or [])
        if not any(word.startswith("--") for word in words):
            words.insert(0, f"--{self.name.replace('_', '-')}")
        names = [spelling for word in words for spelling in word.split("/")]
        names[-1] = f"{names[-1]} {self.value}".strip()
        return names

    @property
    def value(self) -> str:
        """The value of the option; nothing for a flag."""
        kind = _without_none(self.type)
        if kind is bool:
            return ""
        if get_origin(kind) is list:
            kind = get_args(kind)[0]
        if get_origin(kind) is Literal:
            return "|".join(get_args(kind))
        return str(self.info.metavar or TYPES[kind])

    @property
    def limits(self) -> list[str]:
        """Sentences about what an option accepts."""
        bounds = {"At least": self.info.min, "At most": self.info.max}
        return [f"{words} {bound}." for words, bound in bounds.items() if bound is not None]

    @property
    def default_sentence(self) -> list[str]:
        """The signature's default; nothing if the command decides, or for a flag."""
        if self.required:
            return ["Required."] if not self.is_argument else []
        is_silent = self.default is None or self.default is False or self.default == []
        return [] if is_silent else [f"Default: `{self.default}`."]


def parameters(command: Callable[..., None]) -> list[Parameter]:
    """The parameters that the command line offers, in the order of the signature."""
    signature = inspect.signature(command, eval_str=True)
    made = [Parameter(parameter) for parameter in signature.parameters.values()]
    return [parameter for parameter in made if not getattr(parameter.info, "hidden", False)]


def _without_none(kind: Any) -> Any:
    """`X` of `X | None`."""
    if get_origin(kind) in (Union, UnionType):
        return next(each for each in get_args(kind) if each is not type(None))
    return kind


def page(text: str) -> str:
    """The page with the current commands."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{listing()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
