"""The options that several commands share, their choices, and how their values are parsed."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from rotationzoo.errors import UsageError
from rotationzoo.options import argument, flag, option
from rotationzoo.settings import parse_windows
from rotationzoo.zoo.hubs.protocol import HUB_NAMES


def parse_window(text: str) -> tuple[int, int]:
    """Parse `64/256` to one pair of sink and recent tokens. Raises `UsageError`."""
    windows = parse_windows(text) or []
    if len(windows) != 1:
        words = f"--windows {text} is not one pair of sink/recent"
        raise UsageError(words, hint="write it as: --windows 64/256")
    return windows[0]


def parse_clip(text: str) -> tuple[float, float]:
    """Parse `0.96/0.92` to the clip ratios of keys and of values, or one for both. Raises
    `UsageError`."""
    try:
        ratios = [float(part) for part in text.split("/")]
    except ValueError:
        ratios = []
    if len(ratios) not in (1, 2) or not all(0 < ratio <= 1 for ratio in ratios):
        words = f"--clip {text} is not a clip ratio above 0 and at most 1"
        raise UsageError(words, hint="write it as: --clip 0.96/0.92")
    return ratios[0], ratios[-1]


def follow_link(folder: str | Path | None) -> Path | None:
    """The folder that the user named or, if it is a symbolic link, the folder that it leads to. A
    link in a default place may have been planted by anybody, and must not be followed."""
    if folder is None:
        return None
    folder = Path(folder).expanduser()
    return Path(os.path.realpath(folder)) if folder.is_symlink() else folder


if TYPE_CHECKING:
    HubOrBoth = str
    HubOrAny = str
else:
    # Typer reads the choices from the type at run time, but mypy rejects a computed Literal.
    HubOrBoth = Literal[*HUB_NAMES, "both"]
    HubOrAny = Literal[*HUB_NAMES, "any"]

Json = Annotated[bool, option("Print one JSON object and nothing else.")]
Quiet = Annotated[bool, option("Print the result alone, in short.", "--quiet", "-q")]

ArtifactFolder = Annotated[Path, argument("The folder that calibrate wrote.", metavar="ROTATIONS")]
Restart = Annotated[bool, option("Replace an artifact that is there.")]
Clip = Annotated[
    tuple[float, float] | None,
    option("Clip ratios of keys and values, as 0.96/0.92, or one for both.", kind=parse_clip),
]
Windows = Annotated[
    tuple[int, int] | None,
    option("Sink and recent tokens kept exact, as 64/256.", kind=parse_window),
]

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
