"""The options that several commands share, their choices, and how their values are parsed."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from rotationzoo.options import argument, flag, option
from rotationzoo.settings import TrustConfig
from rotationzoo.zoo.hubs.protocol import HUB_NAMES


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


@dataclass(frozen=True)
class Signing:
    """Options on the signature of what is published."""

    sign: str | None = option(
        "keyless, the file of a private key (.pem), or none. Unless given, jobs of GitHub "
        "Actions with an identity sign keyless."
    )
    adopt_index: bool = flag("Sign the index even where its entries have other signers or none.")
    trust_config: TrustConfig = None

    @property
    def words(self) -> list[str]:
        """The options as they are typed."""
        words = ["--sign", self.sign] if self.sign else []
        words += ["--trust-config", str(self.trust_config)] if self.trust_config else []
        return words + ["--adopt-index"] * self.adopt_index


IndexPlace = Annotated[str | None, option("Path of a zoo_index.json.", "--index")]
ZooRepo = Annotated[str | None, option("The zoo: owner/name, or a folder as ./zoo.", "--repo")]
