"""The commands in their order, and what a failure of any of them prints and exits with."""

import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn

import typer

from rotationzoo import __version__
from rotationzoo.cli.calibrate import calibrate_command
from rotationzoo.cli.evaluate import evaluate_command
from rotationzoo.cli.export import export_command
from rotationzoo.cli.import_ import import_command
from rotationzoo.cli.inspect import inspect_command
from rotationzoo.cli.list import list_command
from rotationzoo.cli.output import print_traceback, say, show_error, start_output
from rotationzoo.cli.pull import pull_command
from rotationzoo.cli.push import push_command
from rotationzoo.cli.regenerate import regenerate_command
from rotationzoo.cli.report import report_command
from rotationzoo.cli.validate import validate_command
from rotationzoo.cli.verify import verify_command
from rotationzoo.errors import Interrupted, RotationZooError, UsageError

COMMANDS: dict[str, Callable[..., None]] = {
    "calibrate": calibrate_command,
    "inspect": inspect_command,
    "verify": verify_command,
    "evaluate": evaluate_command,
    "validate": validate_command,
    "report": report_command,
    "export": export_command,
    "import": import_command,
    "list": list_command,
    "pull": pull_command,
    "push": push_command,
    "regenerate": regenerate_command,
}
"""In the order in which a user meets them, which is the order of `--help`."""

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Rotations for 2-bit KV caches: calibrate them, measure them, publish and fetch them.",
)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command, by default the one that this process was started with, and exit.

    Exit codes: 0 done; 1 a known failure; 2 wrong usage; 3 partly done; 130 interrupted.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    start_output()
    try:
        code = _command_line().main(words, "rotationzoo", standalone_mode=False)
    except Exception as error:
        code = _fail(error, as_json="--json" in words)
    sys.exit(code)


def _command_line() -> Any:
    """What Typer makes of the commands."""
    group: Any = typer.main.get_command(app)
    for command in group.commands.values():
        for parameter in command.params:
            if parameter.nargs == -1:
                # Help would say that the type of FILES is `list[path]`, which is Python and no
                # English. Typer has no option for this: it is the one use of its internals.
                parameter.bare_type = lambda: "path"
    return group


def _interruptible(command: Callable[..., None]) -> Callable[..., None]:
    """The command, with Ctrl-C as an error like any other, and a quiet end where nobody reads on.

    Typer would turn both into exit codes before `main` sees them, and without a word.
    """

    @functools.wraps(command)
    def run(**options: Any) -> None:
        try:
            command(**options)
            sys.stdout.flush()  # while a full disk can still be reported
        except KeyboardInterrupt as error:
            raise Interrupted("interrupted") from error
        except BrokenPipeError as error:
            # The reader, such as `head`, has read enough. Python would complain of the closed pipe
            # when it exits.
            for stream in (sys.stdout, sys.stderr):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            raise typer.Exit(1) from error

    return run


for _name, _command in COMMANDS.items():
    app.command(_name)(_interruptible(_command))


def _print_version(wanted: bool) -> None:
    if wanted:
        say(__version__)
        raise typer.Exit()


@app.callback()
def _common_options(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Options that stand before the command."""


def _fail(error: Exception, as_json: bool) -> int:
    """Report a failure in two lines, after its traceback if `ROTATIONZOO_DEBUG=1` asks for one.
    Returns the exit code."""
    if os.environ.get("ROTATIONZOO_DEBUG") == "1":
        print_traceback(error)
    known = _known_error(error)
    if str(known):
        show_error(known, as_json)
    return known.exit_code


def _known_error(error: Exception) -> RotationZooError:
    if isinstance(error, RotationZooError):
        return error
    if isinstance(error, typer.Abort):
        return Interrupted("interrupted")
    if hasattr(
        error, "format_message"
    ):  # the base class of Typer's own errors was not always public
        return _usage_error(error)
    if isinstance(error, OSError) and error.strerror:
        place = f"{error.filename}: " if error.filename else ""
        return RotationZooError(
            f"{place}{error.strerror}", hint="check who may read and write there, and the room"
        )
    return _unexpected_error(error)


def _usage_error(error: Any) -> UsageError:
    """What Typer objects to in the words of a command, with the page that says how it is used. Its
    message is empty where that page is already on the screen."""
    message = error.format_message().removesuffix(".").replace("Value error, ", "")
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "rotationzoo"
    return UsageError(message, hint=f"see: {path} --help")


def _unexpected_error(error: Exception) -> RotationZooError:
    """An error that nobody foresaw, in one line: its type, and the first line of its message."""
    lines = (line.strip() for line in str(error).splitlines())
    first = next(filter(None, lines), "")
    name = type(error).__name__
    return RotationZooError(
        f"{name}: {first}" if first else name,
        hint="for the traceback, run again with ROTATIONZOO_DEBUG=1",
    )
