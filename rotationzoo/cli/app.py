"""The Typer app: the commands, their `--help`, and how failures become messages and exit codes."""

import functools
import importlib
import inspect
import keyword
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from types import NoneType
from typing import Annotated, Any, NoReturn, get_args, get_origin

import typer
from typer.core import TyperCommand

from rotationzoo import __version__
from rotationzoo.cli import output
from rotationzoo.cli.next_steps import remember_words
from rotationzoo.cli.output import hush_libraries
from rotationzoo.errors import Interrupted, RotationZooError, UsageError, first_sentence
from rotationzoo.storage.files import remedy

_GROUPS = {
    "Text": "chat max_new_tokens data subset split column tokens length lengths seed tasks "
    "questions",
    "Model and machine": "revision device dtype device_map max_memory batch rope_scaling",
    "Signatures": "signers issuer require_signature trust_config sign adopt_index",
    "For experts (--for picks most)": "bits key_bits value_bits format sink "
    "recent windows clip pooled rivals uncentered prefill_chunk "
    "prefill_layout",
}
_GROUP_OF = {name: group for group, names in _GROUPS.items() for name in names.split()}


class Command(TyperCommand):
    """A command that shows the options of `_GROUPS` in groups, after all others."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then each group of options."""
        groups: dict[str, list[tuple[str, str]]] = {}
        groups |= {name: [] for name in ("Arguments", "Options", *_GROUPS)}
        for parameter in self.get_params(ctx):
            is_argument = parameter.param_type_name == "argument"
            group = "Arguments" if is_argument else _GROUP_OF.get(parameter.name, "Options")
            if row := parameter.get_help_record(ctx):
                groups[group].append(row)
        for name, rows in groups.items():
            if rows:
                with formatter.section(name):
                    formatter.write_dl(rows)


_MODEL = "Qwen/Qwen3-8B"
_JOURNEYS = (
    ("demo", "see it work: a minute, no network"),
    (f"pull {_MODEL} --for vllm", "fetch rotations for an engine"),
    (f"plan {_MODEL}", "see what fits a GPU"),
    (f"calibrate {_MODEL}", "make rotations yourself"),
    (f"evaluate {_MODEL} FOLDER", "see what they keep of the model"),
    ("report FOLDER", "a page to decide by"),
    (f"serve {_MODEL}", "a vLLM server with a 2-bit cache"),
    (f"generate {_MODEL} -p 'Hi'", "the same cache in transformers"),
    ("export FOLDER --for sglang", "files for a fork of an engine"),
    ("push FOLDER OWNER/REPO", "publish what you made"),
)
"""Command without its first word -> what it is for."""


def journey_lines() -> list[str]:
    """The page of `rotationzoo` alone, in 80 columns."""
    width = max(len(command) for command, _ in _JOURNEYS)
    lines = [f"  rotationzoo {command:{width}}  {purpose}" for command, purpose in _JOURNEYS]
    title = "rotationzoo: rotations for a KV cache that is stored in 2 bits"
    return [title, "", *lines, "", "All commands: rotationzoo --help"]


_NAMES = (
    "demo plan calibrate inspect verify evaluate generate serve validate report export import list "
    "pull push regenerate"
)
"""The commands in the order of `--help`, each the function `NAME_command` in its own module."""


app = typer.Typer(
    invoke_without_command=True,  # `_common_options` then shows the journeys
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Rotations for 2-bit KV caches: calibrate them, measure them, publish and fetch them.",
)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command, by default the one on the command line, and exit: 0 done; 1 failed; 2 wrong
    usage; 3 partly done; 4 undecided; 130 interrupted."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    remember_words(words)
    output.start_output()
    # Set before torch is loaded: on a busy machine, threads that spin while they wait make commands
    # several times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        # Outside standalone mode, errors reach `_fail` instead of being printed by Typer.
        group: Any = typer.main.get_command(app)
        code = group.main(words, "rotationzoo", standalone_mode=False)
    except Exception as error:
        code = _fail(error, words)
    try:
        sys.stdout.flush()
    except OSError as error:  # which Python would report again as it exits
        code = code or int(isinstance(error, BrokenPipeError)) or _fail(error, [])
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _options_of(group: Callable[..., Any]) -> Iterator[inspect.Parameter]:
    """The options of a command or a group: its parameters or fields that have a help text."""
    if isinstance(group, type) and is_dataclass(group):
        members = [(each.name, each.type, each) for each in fields(group)]
    else:
        parameters = inspect.signature(group).parameters.values()
        members = [(each.name, each.annotation, each.default) for each in parameters]
    for name, kind, declared in members:
        default = declared.default if isinstance(declared, Field) else declared
        if get_origin(kind) is Annotated:
            kind, declared = get_args(kind)
        if isinstance(declared, Field) and declared.metadata:
            yield _option(name, kind, declared.metadata, default)


def _option(name: str, kind: Any, about: Mapping[str, Any], default: Any) -> inspect.Parameter:
    """A parameter whose default is Typer's description of the option."""
    names, typed, more = about["names"], about["kind"], about["more"]
    if default is False and not names:  # or Typer would add a `--no-...`
        names = (f"--{name.replace('_', '-')}",)
    if inspect.isfunction(typed):
        typed, more = str | None, {"parser": typed, "metavar": "<str>", **more}
    kind = typed or kind
    if default in (MISSING, inspect.Parameter.empty, ()):
        default = None if NoneType in get_args(kind) else ...
    make = typer.Argument if about["argument"] else typer.Option
    shown = make(default, *names, help=about["help"], **more)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=shown, annotation=kind)


def _runnable(command: Callable[..., None]) -> Callable[..., None]:
    """The command for Typer, with every option in its signature: its own, then those of its groups,
    `Output` last. Ctrl-C raises `Interrupted`, before Typer turns it into an exit code."""
    spread = [*_options_of(command)]
    parameters, single = inspect.signature(command).parameters, [each.name for each in spread]
    groups = {name: parameters[name].annotation for name in parameters if name not in single}
    for group in sorted(groups.values(), key=lambda each: each is output.Output):
        spread += _options_of(group)

    @functools.wraps(command)
    def run(**values: Any) -> None:
        for name, group in groups.items():
            own = {each.name: values.pop(each.name) for each in _options_of(group)}
            values[name] = group(**own)
        try:
            # Each process would run the whole command.
            if "LOCAL_RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":
                hint = "start it without torchrun, and use --device-map auto for several GPUs"
                raise UsageError("rotationzoo runs in one process", hint)
            hush_libraries()
            command(**values)
            sys.stdout.flush()  # now, while the error of a full disk can still be reported
        except KeyboardInterrupt as error:
            raise Interrupted("interrupted") from error

    run.__signature__ = inspect.Signature(spread)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in spread}
    return run


COMMANDS: dict[str, Callable[..., None]] = {}
for _name in _NAMES.split():
    _module = importlib.import_module(f"rotationzoo.cli.{_name}{'_' * keyword.iskeyword(_name)}")
    COMMANDS[_name] = _runnable(getattr(_module, f"{_name}_command"))
    # `serve` passes unknown options to vLLM.
    _settings = {"ignore_unknown_options": _name == "serve"}
    app.command(_name, cls=Command, context_settings=_settings)(COMMANDS[_name])


@app.callback()
def _common_options(
    context: typer.Context,
    show_version: bool = typer.Option(False, "--version", help="Print the version."),
) -> None:
    """Options before the command. Without a command, show the journeys."""
    if show_version:
        output.say(__version__)
        raise typer.Exit()
    if context.invoked_subcommand is None:
        output.show_lines(*journey_lines())


def _fail(error: Exception, words: Sequence[str]) -> int:
    """Print an error and its hint (with `ROTATIONZOO_DEBUG=1` its traceback); return its code."""
    if os.environ.get("ROTATIONZOO_DEBUG") == "1":
        output.print_traceback(error)
    failure = _as_failure(error)
    if isinstance(failure, Interrupted) and failure.hint is None:
        failure.hint = f"run it again with: {shlex.join(['rotationzoo', *words])}"
    if str(failure):
        # The words are searched because parsing the options may be what failed.
        output.show_error(failure, as_json="--json" in words)
    return failure.exit_code


def _as_failure(error: Exception) -> RotationZooError:
    """The error as a sentence and a hint."""
    if isinstance(error, RotationZooError):
        return error
    if isinstance(error, typer.Abort):
        return Interrupted("interrupted")
    # Typer's own errors. Their base class was not public in every version, so test for its method.
    if hasattr(error, "format_message"):
        return _usage_error(error)
    if isinstance(error, OSError) and error.strerror:
        place = f"{error.filename}: " if error.filename else ""
        return RotationZooError(f"{place}{error.strerror}", remedy(error) or "check the path")
    name, first = type(error).__name__, first_sentence(error)
    if "home directory" in first:  # what `Path.expanduser` raises
        hint = "write the whole path"
        return RotationZooError("a path begins with ~ and a user without a home directory", hint)
    message = name if first == name else f"{name}: {first}"
    return RotationZooError(message, "for the traceback, run again with ROTATIONZOO_DEBUG=1")


def _usage_error(error: Any) -> UsageError:
    """A usage error of Typer's; the message is empty if Typer has already printed the help."""
    message = error.format_message().removesuffix(".").replace("Value error, ", "")
    message = message.partition(", unable to parse")[0].replace("Input should", "it must")
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "rotationzoo"
    return UsageError(message, hint=f"see: {path} --help")
