"""Downloading a published rotation to a local folder, and checking what that folder may hold."""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rotationzoo.artifact.store import MANIFEST, PARTS, Artifact
from rotationzoo.errors import RotationZooError
from rotationzoo.progress import Progress
from rotationzoo.storage.files import child, regular_file, sha256, size_of
from rotationzoo.storage.folders import check_name, recover
from rotationzoo.storage.growth import size_of_all, tell_growth
from rotationzoo.zoo.hubs.registry import HUBS, open_hub
from rotationzoo.zoo.index import Copy, Entry, File
from rotationzoo.zoo.signing.verify import Finding

WAY_OUT = "choose another place with --local-dir"  # on a full disk
LOCK = "zoo.lock.json"
"""For files without published hashes: records their hashes at the first download."""


@dataclass(frozen=True)
class Pulled:
    """A published rotation on this machine."""

    path: Path
    entry: Entry
    copy: Copy
    revision: str | None
    files: dict[str, str]
    """Name -> sha256 of the file on disk."""
    notes: list[str] = field(default_factory=list)
    artifact: Artifact | None = None
    """The opened artifact, with whatever the checks have read of it. None for OSCAR's own files."""
    signature: Finding | None = None
    """The finding on its signature. None for OSCAR's own files, which have none."""


def cache_folder(copy: Copy, revision: str | None) -> Path:
    """The default folder for pulled files: huggingface_hub's cache of assets of other libraries."""
    from huggingface_hub import cached_assets_path

    place = cached_assets_path("rotationzoo", namespace=copy.hub, subfolder=copy.repo)
    return child(place, f"{revision or 'unpinned'}/{copy.path}")


def hash_files(folder: Path, listed: Mapping[str, File]) -> dict[str, str] | None:
    """Name -> sha256 of the listed files in a folder.

    Returns None if a file is missing, is not a regular file of the folder, or differs from its
    listing in size or hash.
    """
    hashes: dict[str, str] = {}
    # A killed process may have left the folder set aside under another name.
    recover(folder)
    for name, file in listed.items():
        try:
            path = regular_file(folder, name)
        except RotationZooError:
            return None
        # Compare sizes first: hashing a file of the wrong size would waste time.
        if size_of(path) != file.size:
            return None
        hashes[name] = sha256(path)
        if hashes[name] != file.sha256:
            return None
    return hashes


def check_target(target: Path, entry: Entry) -> None:
    """Raise `RotationZooError` if the target holds anything that `pull` did not put there."""
    check_name(target)
    names = set()
    if target.is_dir():
        names = {path.name for path in target.iterdir()}
    is_pulled = bool(names & {MANIFEST, LOCK}) and names <= {*PARTS, LOCK, *entry.files}
    if os.path.lexists(target) and not (target.is_dir() and (is_pulled or not names)):
        raise RotationZooError(
            f"{target} exists and holds other files", hint="choose another place with --local-dir"
        )


def download_files(
    copy: Copy, revision: str | None, sizes: Mapping[str, int], work: Path, progress: Progress
) -> Path:
    """Fetch the files of a copy; `sizes` maps each name to its size in bytes.

    Returns a folder inside `work` that holds these files and nothing else. Raises
    `RotationZooError` before the first download if the disk has no room for all of them.
    """
    needed, free = sum(sizes.values()), shutil.disk_usage(work).free
    if needed > free:
        raise RotationZooError(
            f"{copy.path} of {copy.repo} is {needed:,} bytes, and {free:,} are free on the disk",
            hint="make room, or choose another place with --local-dir",
        )
    raw, clean = work / "download", work / "files"
    paths = {copy.path_of(name): size for name, size in sizes.items()}
    stage = f"downloading from {copy.repo} on {HUBS[copy.hub].title}"
    with tell_growth(lambda: size_of_all(raw.rglob("*")), stage, needed, progress):
        open_hub(copy.hub).fetch(copy.repo, revision, paths, raw)
    # The hubs' clients leave files of their own next to the downloads, so move ours elsewhere.
    clean.mkdir()
    for name in sizes:
        regular_file(raw, copy.path_of(name)).rename(child(clean, name))
    return clean
