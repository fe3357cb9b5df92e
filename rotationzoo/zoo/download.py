"""The folder on this machine that a published rotation is downloaded to, and what it may hold."""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rotationzoo.artifact.store import MANIFEST, PARTS, Artifact
from rotationzoo.errors import RotationZooError
from rotationzoo.storage.files import child, regular_file, sha256, size_of
from rotationzoo.storage.folders import check_name, recover
from rotationzoo.zoo.hubs.registry import open_hub
from rotationzoo.zoo.index import Copy, Entry, File

LOCK = "zoo.lock.json"
"""Beside files without published hashes: what they were when they were first downloaded."""


@dataclass(frozen=True)
class Pulled:
    """A published rotation on this machine."""

    path: Path
    entry: Entry
    copy: Copy
    revision: str | None
    files: dict[str, str]
    """Name -> sha256 of what is on the disk."""
    notes: list[str] = field(default_factory=list)
    artifact: Artifact | None = None
    """The artifact, with what was read of it when it was checked; None of OSCAR's own files."""


def cache_folder(copy: Copy, revision: str | None) -> Path:
    """Where pulled files go by default: huggingface_hub's folder for other libraries' files."""
    from huggingface_hub import cached_assets_path

    place = cached_assets_path("rotationzoo", namespace=copy.hub, subfolder=copy.repo)
    return child(place, f"{revision or 'unpinned'}/{copy.path}")


def hash_files(folder: Path, listed: Mapping[str, File]) -> dict[str, str] | None:
    """Name -> sha256 of the listed files of a folder.

    None if one is missing, is no regular file of the folder, or differs from what is listed.
    """
    hashes: dict[str, str] = {}
    recover(folder)
    for name, file in listed.items():
        try:
            path = regular_file(folder, name)
        except RotationZooError:
            return None
        # The size first: it costs nothing.
        if size_of(path) != file.size:
            return None
        hashes[name] = sha256(path)
        if hashes[name] != file.sha256:
            return None
    return hashes


def check_target(target: Path, entry: Entry) -> None:
    """Raise `RotationZooError` for a place that holds anything but what `pull` put there."""
    check_name(target)
    names = set()
    if target.is_dir():
        names = {path.name for path in target.iterdir()}
    is_pulled = bool(names & {MANIFEST, LOCK}) and names <= {*PARTS, LOCK, *entry.files}
    if os.path.lexists(target) and not (target.is_dir() and (is_pulled or not names)):
        raise RotationZooError(
            f"{target} exists and holds other files", hint="choose another place with --local-dir"
        )


def download_files(copy: Copy, revision: str | None, sizes: Mapping[str, int], work: Path) -> Path:
    """Fetch the files of a copy; `sizes` is name -> bytes.

    Returns the folder, inside `work`, that holds them and nothing else. Raises `RotationZooError`
    before anything is fetched where the disk has no room for all of them.
    """
    needed, free = sum(sizes.values()), shutil.disk_usage(work).free
    if needed > free:
        raise RotationZooError(
            f"{copy.path} of {copy.repo} is {needed:,} bytes, and {free:,} are free on the disk",
            hint="make room, or choose another place with --local-dir",
        )
    raw, clean = work / "download", work / "files"
    paths = {copy.path_of(name): size for name, size in sizes.items()}
    open_hub(copy.hub).fetch(copy.repo, revision, paths, raw)
    # The clients put files of their own beside those that were asked for.
    clean.mkdir()
    for name in sizes:
        regular_file(raw, copy.path_of(name)).rename(child(clean, name))
    return clean
