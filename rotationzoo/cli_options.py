"""The command line's frame: errors and exit codes of every command, and the options that several share."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from rotationzoo import __version__
from rotationzoo.console import print_traceback, report
from rotationzoo.errors import Interrupted, RotationZooError, UsageError


class _Commands(typer.core.TyperGroup):
    """Turns a known failure of any command into two lines and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except RotationZooError as error:
            if os.environ.get("ROTATIONZOO_DEBUG") == "1":
                print_traceback(error)
            report(error)
            raise typer.Exit(error.exit_code) from error
        except KeyboardInterrupt as error:
            report(Interrupted("interrupted"))
            raise typer.Exit(Interrupted.exit_code) from error
        except OSError as error:  # a file that may not be read, a full disk, a closed pipe
            if os.environ.get("ROTATIONZOO_DEBUG") == "1":
                raise
            if isinstance(error, BrokenPipeError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains of it when it exits
                raise typer.Exit(1) from error
            place = f"{error.filename}: " if error.filename else ""
            report(
                RotationZooError(f"{place}{error.strerror or error}", hint="check who may read and write there, and the room")
            )
            raise typer.Exit(1) from error


app = typer.Typer(
    cls=_Commands, no_args_is_help=True, pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Rotations for 2-bit KV caches: calibrate them, measure them, publish and fetch them.",
)  # fmt: skip

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print names only.")]
ArtifactFolder = Annotated[Path, typer.Argument(help="The folder that calibrate wrote.", metavar="ARTIFACT")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")]
IndexPlace = Annotated[str | None, typer.Option("--index", help="Path or URL of a zoo_index.json.")]
ZooRepo = Annotated[str | None, typer.Option("--repo", help="The zoo repository whose index to read.")]
Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where to run.")]
Dtype = Annotated[Literal["auto", "bfloat16", "float32"], typer.Option(help="auto: the model's own, float32 on a CPU.")]
DeviceMap = Annotated[str | None, typer.Option(help="auto: spread over GPUs, main memory and disk.")]
PrefillChunk = Annotated[
    int | None, typer.Option(min=1, help="Prefill in chunks of so many tokens, which read the quantized history.")
]
PrefillLayout = Annotated[
    Literal["server", "window"] | None,
    typer.Option(help="Exact between chunks: the sink alone, as OSCAR's server has it (server), or the recent window too."),
]
MaxMemory = Annotated[str | None, typer.Option(help="Limits for the device map: 0=20GiB,cpu=60GiB.")]


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
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
    """The folder that the user names, or what it leads to where it is a link: links in the places of defaults are nobody's
    choice, and are not followed."""
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
        raise UsageError(f"--layers has no layer in {part!r}", hint="write it as: --layers 0,4-7") from error
    return layers


def parse_windows(text: str | None) -> list[tuple[int, int]]:
    """`64/256,128/1024` as pairs of sink and recent tokens. Raises `UsageError`."""
    windows = []
    for part in filter(None, (text or "").split(",")):
        sink, _, recent = part.partition("/")
        if not (sink.strip().isdecimal() and recent.strip().isdecimal() and part.isascii()):
            raise UsageError(f"--windows has no sink/recent in {part!r}", hint="write it as: --windows 64/256,128/1024")
        windows.append((int(sink), int(recent)))
    return list(dict.fromkeys(windows))
