"""The options that several commands share, their choices, and how their values are parsed."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rotationzoo.codec.engine_needs import EngineName
from rotationzoo.codec.formats import SIMULATED
from rotationzoo.errors import UsageError
from rotationzoo.recall.questions import TASKS
from rotationzoo.zoo.hubs.protocol import HUB_NAMES


def option(help: str, *names: str, default: Any = None, **settings: Any) -> Any:
    """An option with its `help`, as the default of the parameter that gets its value, whose name it
    has without `names`. Options that several commands share are annotated types."""
    return typer.Option(default, *names, help=help, **settings)


def flag(help: str, *names: str) -> Any:
    """An option that is given or not, without a value."""
    return option(help, *names, default=False)


def argument(help: str, default: Any = ..., **settings: Any) -> Any:
    """An argument with its `help`, in the same two places. Without a default, it is required."""
    return typer.Argument(default, help=help, **settings)


def parse_windows(text: str | None) -> list[tuple[int, int]]:
    """Parse `64/256,128/1024` to pairs of sink and recent tokens. Raises `UsageError`."""
    windows = []
    for part in filter(None, (text or "").split(",")):
        sink, _, recent = part.partition("/")
        if not (sink.strip().isdecimal() and recent.strip().isdecimal() and part.isascii()):
            hint = "write it as: --windows 64/256,128/1024"
            raise UsageError(f"--windows has no sink/recent in {part!r}", hint)
        windows.append((int(sink), int(recent)))
    return list(dict.fromkeys(windows))


def parse_window(text: str | None) -> tuple[int, int] | None:
    """Parse `64/256` to one pair of sink and recent tokens. Raises `UsageError`."""
    windows = parse_windows(text)
    if text is not None and len(windows) != 1:
        words = f"--windows {text} is not one pair of sink/recent"
        raise UsageError(words, hint="write it as: --windows 64/256")
    return windows[0] if windows else None


def parse_clip(text: str | None) -> tuple[float, float] | None:
    """Parse `0.96/0.92` to the clip ratios of keys and of values, or one for both. Raises
    `UsageError`."""
    if text is None:
        return None
    try:
        ratios = [float(part) for part in text.split("/")]
    except ValueError:
        ratios = []
    if len(ratios) not in (1, 2) or not all(0 < ratio <= 1 for ratio in ratios):
        words = f"--clip {text} is not a clip ratio above 0 and at most 1"
        raise UsageError(words, hint="write it as: --clip 0.96/0.92")
    return ratios[0], ratios[-1]


def parse_tasks(tasks: str) -> list[str] | None:
    """Parse the names of recall tasks, such as `needles,copy`, `all` (None) or `none`."""
    if tasks == "all":
        return None
    names = tasks.split(",") if tasks != "none" else []
    return list(dict.fromkeys(name.strip() for name in names))


def parse_lengths(lengths: str | None) -> list[int] | None:
    """Parse the lengths of prompts, such as `2048,8192`. Raises `UsageError`."""
    if lengths is None:
        return None
    parts = [part.strip() for part in lengths.split(",")]
    if not all(part.isdecimal() and part.isascii() for part in parts):
        words = f"--lengths {lengths} is not a list of numbers of tokens"
        raise UsageError(words, hint="write it as: --lengths 2048,8192")
    return list(dict.fromkeys(map(int, parts)))


def follow_link(folder: Path | None) -> Path | None:
    """The folder that the user named or, if it is a symbolic link, the folder that it leads to. A
    link in a default place may have been planted by anybody, and must not be followed."""
    if folder is None:
        return None
    folder = folder.expanduser()
    return Path(os.path.realpath(folder)) if folder.is_symlink() else folder


if TYPE_CHECKING:
    HubOrBoth = str
    HubOrAny = str
    Format = str
else:
    # Typer reads the choices from the type at run time, but mypy rejects a computed Literal.
    HubOrBoth = Literal[*HUB_NAMES, "both"]
    HubOrAny = Literal[*HUB_NAMES, "any"]
    Format = Literal[tuple(SIMULATED)]

Json = Annotated[bool, option("Print one JSON object and nothing else.")]
Quiet = Annotated[bool, option("Print the result alone, in short.", "--quiet", "-q")]

ModelName = Annotated[str, argument("A hub id, folder, GGUF file, or demo.")]
ArtifactFolder = Annotated[Path, argument("The folder that calibrate wrote.", metavar="ROTATIONS")]
OutputFolder = Annotated[Path | None, option("Folder (rotations/MODEL-RECIPE).", "--output", "-o")]
Restart = Annotated[bool, option("Replace an artifact that is there.")]
Revision = Annotated[str | None, option("Branch, tag or commit of a hub model.")]
Device = Annotated[Literal["auto", "cpu", "cuda"], option("Where to run.")]
TextLength = Annotated[int | None, option("Tokens per text (2048; more for windows).", min=2)]


@dataclass(frozen=True)
class Machine:
    """Options on where a model runs."""

    device: Device = "auto"
    device_map: str | None = option("auto: over GPUs, main memory and disk.")
    max_memory: str | None = option("Limits of that map: 0=20GiB,cpu=60GiB.")


@dataclass(frozen=True)
class Loading(Machine):
    """Options on which model runs, where, and for what."""

    revision: Revision = None
    dtype: Literal["auto", "bfloat16", "float32"] = option("auto: the model's own.", default="auto")
    engine: EngineName | None = option("The engine that serves it.", "--for")


@dataclass(frozen=True)
class Text(Loading):
    """Options on a model and the text that it reads."""

    data: str | None = option("Data set id, .jsonl, .txt or .parquet, or bundled.")
    subset: str | None = option("The data set's configuration.")
    split: str | None = option("The data set's split (train).")
    column: str | None = option("Column of the text or of the chat messages.")
    tokens: int | None = option("Tokens in all (32768).", min=1)
    length: int | None = option("Tokens per row (8192).", min=2)
    seed: int | None = option("Order of the documents (0).")


RopeScaling = Annotated[str | None, option("Scale RoPE: yarn:4, yarn:4:32768, linear:2.")]

Clip = Annotated[
    str | None, option("Clip ratios of keys and values, as 0.96/0.92, or one for both.")
]
Windows = Annotated[str | None, option("Sink and recent tokens kept exact, as 64/256.")]

Anyway = Annotated[bool, option("Also take rotations of other weights.")]
Rounding = Annotated[
    Literal["nearest", "feedback"] | None,
    option("How rows get their codes (feedback, where the artifact has it)."),
]
Budget = Annotated[float | None, option("Another budget of bits.", "--bits", min=2, max=4)]
Sink = Annotated[int | None, option("First tokens kept exact (the recipe's).", min=0)]
PrefillLayout = Annotated[
    Literal["server", "window"] | None, option("Earlier tokens that a chunk reads exact.")
]

Tasks = Annotated[str, option(f"{', '.join(TASKS)}; none.")]
Lengths = Annotated[str | None, option("Tokens per prompt, as 2048,8192 (--length).")]

_TrustConfig = Annotated[
    Path | None, option("Keys of another Sigstore than the public one, as a JSON file.")
]


@dataclass(frozen=True)
class Signatures:
    """Options on the signatures of what is read, by the names that `make_demand` has for them."""

    signers: list[str] | None = option(
        "Accept only what this identity, or this public key (a .pem file), has signed. "
        "May be repeated.",
        "--signer",
        metavar="SIGNER",
    )
    issuer: str | None = option("Who vouches for the identity; not needed for workflows of GitHub.")
    require_signature: bool = flag("Refuse what is not signed.")
    trust_config: _TrustConfig = None


@dataclass(frozen=True)
class Signing:
    """Options on the signature of what is published."""

    sign: str | None = option(
        "keyless, the file of a private key (.pem), or none. Unless given, jobs of GitHub "
        "Actions with an identity sign keyless."
    )
    adopt_index: bool = flag("Sign the index even where its entries have other signers or none.")
    trust_config: _TrustConfig = None

    @property
    def words(self) -> list[str]:
        """The options as they are typed."""
        words = ["--sign", self.sign] if self.sign else []
        words += ["--trust-config", str(self.trust_config)] if self.trust_config else []
        return words + ["--adopt-index"] * self.adopt_index


IndexPlace = Annotated[str | None, option("Path of a zoo_index.json.", "--index")]
ZooRepo = Annotated[str | None, option("The zoo: owner/name, or a folder as ./zoo.", "--repo")]
