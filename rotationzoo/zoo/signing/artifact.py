"""The signature of an artifact: it lies in the folder as `model.sig`, and is for the manifest and
the files that the manifest lists."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rotationzoo.artifact.store import CARD, MANIFEST, SIGNATURE, Artifact
from rotationzoo.storage import files
from rotationzoo.storage.files import sha256
from rotationzoo.zoo.signing.bundle import LIMIT
from rotationzoo.zoo.signing.check import Finding, Signed, check_signature
from rotationzoo.zoo.signing.demand import Demand

# The signature cannot be for itself. The card is prose that is written anew from the manifest.
_UNSIGNED = {CARD, SIGNATURE}


def signed_part(named: Mapping[str, str]) -> dict[str, str]:
    """Of the files of an artifact (name -> sha256), those that its signature is for."""
    return {name: digest for name, digest in named.items() if name not in _UNSIGNED}


def read_signature(folder: Path) -> bytes | None:
    """The signature in an artifact's folder; None if it has none. Raises `RotationZooError`."""
    path = folder / SIGNATURE
    if files.size_of(path) is None:
        return None
    return files.read(path, LIMIT)


def check_artifact(artifact: Artifact, demand: Demand) -> Finding:
    """Check the signature in the folder of an artifact, on this machine and with no index.

    Raises as `check_signature`.
    """
    folder = artifact.folder
    hashes = {MANIFEST: sha256(files.regular_file(folder, MANIFEST))}
    for name in artifact.manifest.files:
        if name not in artifact.hashes:
            artifact.hashes[name] = sha256(files.regular_file(folder, name))
        hashes[name] = artifact.hashes[name]
    signed = Signed(str(folder), signed_part(hashes), read_signature(folder))
    return check_signature(signed, demand)


def check_files(signed: Signed, folder: Path, demand: Demand) -> Finding:
    """Check the signature of an artifact's files in `folder`, whose hashes are in `signed`.

    The signature is read only where an index lists it, because another one is of no entry. Raises
    as `check_signature`.
    """
    signature = read_signature(folder) if SIGNATURE in signed.hashes else None
    part = replace(signed, hashes=signed_part(signed.hashes), signature=signature)
    return check_signature(part, demand)
