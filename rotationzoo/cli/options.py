"""The command line's frame: errors and exit codes of every command, and the options that several
share."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from rotationzoo import __version__
from rotationzoo.cli.output import begin, print_traceback, report, say, unexpected
from rotationzoo.errors import Interrupted, RotationZooError, UsageError

JOURNEY = (
    "calibrate", "inspect", "verify", "evaluate", "validate", "report", "export", "import", "list", "pull", "push",
    "regenerate",
)  # fmt: skip
"""Commands in the order in which one meets them, as help lists them."""


class _Commands(typer.core.TyperGroup):
    """Turns a failure of any command into two lines and an exit code, with a traceback only where
    it was asked for."""

    def main(self, args: Sequence[str] | None = None, **options: Any) -> Any:  # type: ignore[override]
        words = list(sys.argv[1:] if args is None else args)
        begin()
        try:
            code = super().main(args=words, **options | {"standalone_mode": False})
        except Exception as error:
            code = _fail(error, as_json="--json" in words)
        sys.exit(code)

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except KeyboardInterrupt as error:
            raise Interrupted("interrupted") from error
        except BrokenPipeError as error:  # who reads has read enough
            for stream in (sys.stdout, sys.stderr):  # or Python complains of it when it exits
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            raise typer.Exit(1) from error

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(
            super().list_commands(ctx),
            key=lambda name: JOURNEY.index(name) if name in JOURNEY else len(JOURNEY),
        )

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        for parameter in command.params if command else []:
            if (
                isinstance(parameter, typer.core.TyperArgument)
                and parameter.type_descriptor.is_list
            ):
                # list[Path] is Python's word
                parameter.bare_type = lambda: "path"  # type: ignore[method-assign]
        return command


def _fail(error: Exception, as_json: bool) -> int:
    """Report any failure; what the command line exits with."""
    if os.environ.get("ROTATIONZOO_DEBUG") == "1":
        print_traceback(error)
    if isinstance(error, typer.Abort):
        error = Interrupted("interrupted")
    elif hasattr(error, "format_message"):  # typer's own
        error = _usage(error)
    elif isinstance(error, OSError) and error.strerror:
        place = f"{error.filename}: " if error.filename else ""
        error = RotationZooError(
            f"{place}{error.strerror}", hint="check who may read and write there, and the room"
        )
    elif not isinstance(error, RotationZooError):
        error = unexpected(error)
    if str(error):
        report(error, as_json)
    return error.exit_code


def _usage(error: Any) -> UsageError:
    """What typer found wrong with the words of a command, with the page that says how it is
    used."""
    message = error.format_message().removesuffix(".").replace("Value error, ", "")
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "rotationzoo"
    return UsageError(
        "" if type(error).__name__ == "NoArgsIsHelpError" else message, hint=f"see: {path} --help"
    )


app = typer.Typer(
    cls=_Commands, no_args_is_help=True, pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Rotations for 2-bit KV caches: calibrate them, measure them, publish and fetch them.",
)  # fmt: skip

Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print names only.")]
ArtifactFolder = Annotated[
    Path, typer.Argument(help="The folder that calibrate wrote.", metavar="ARTIFACT")
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")]
IndexPlace = Annotated[str | None, typer.Option("--index", help="Path or URL of a zoo_index.json.")]
ZooRepo = Annotated[
    str | None, typer.Option("--repo", help="The zoo repository whose index to read.")
]
Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where to run.")]
Dtype = Annotated[
    Literal["auto", "bfloat16", "float32"],
    typer.Option(help="auto: the model's own, float32 on a CPU."),
]
DeviceMap = Annotated[
    str | None, typer.Option(help="auto: spread over GPUs, main memory and disk.")
]
PrefillChunk = Annotated[
    int | None,
    typer.Option(
        min=1, help="Prefill in chunks of so many tokens, which read the quantized history."
    ),
]
PrefillLayout = Annotated[
    Literal["server", "window"] | None,
    typer.Option(
        help="Exact between chunks: the sink alone, as OSCAR's server has it (server), or the recent window too."
    ),
]
MaxMemory = Annotated[
    str | None, typer.Option(help="Limits for the device map: 0=20GiB,cpu=60GiB.")
]


def _version(wanted: bool) -> None:
    if wanted:
        say(__version__)
        raise typer.Exit()


@app.callback()
def main(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Run with ROTATIONZOO_DEBUG=1 for tracebacks."""


def default_output(model: str, recipe: str) -> Path:
    """`rotations/MODEL-RECIPE`, by the folder's own name where the model is a path such as `.`."""
    path = Path(model)
    return Path("rotations") / f"{(path.resolve() if path.is_dir() else path).name}-{recipe}"


def named(folder: Path | None) -> Path | None:
    """The folder that the user names, or what it leads to where it is a link: links in the places
    of defaults are nobody's choice, and are not followed."""
    if folder is None:
        return None
    folder = folder.expanduser()
    return Path(os.path.realpath(folder)) if folder.is_symlink() else folder


def parse_layers(text: str | None) -> set[int] | None:
    """`0,4-7` as `{0, 4, 5, 6, 7}`. Raises `UsageError`."""
    if text is None:
        return None
    layers: set[int] = set()
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            found = range(int(first), int(last or first) + 1)
            if not found:
                raise ValueError(part)
            layers |= set(found)
    except ValueError as error:
        raise UsageError(
            f"--layers has no layer in {part!r}", hint="write it as: --layers 0,4-7"
        ) from error
    return layers


def parse_windows(text: str | None) -> list[tuple[int, int]]:
    """`64/256,128/1024` as pairs of sink and recent tokens. Raises `UsageError`."""
    windows = []
    for part in filter(None, (text or "").split(",")):
        sink, _, recent = part.partition("/")
        if not (sink.strip().isdecimal() and recent.strip().isdecimal() and part.isascii()):
            raise UsageError(
                f"--windows has no sink/recent in {part!r}",
                hint="write it as: --windows 64/256,128/1024",
            )
        windows.append((int(sink), int(recent)))
    return list(dict.fromkeys(windows))
