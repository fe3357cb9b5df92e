"""Writes an artifact, whole or not at all, with its card and a checksum of each file."""

import logging
import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rotationzoo import __version__
from rotationzoo.artifact.layout import rotation_tensors, statistics_tensors
from rotationzoo.artifact.manifest import ROTATIONS, SCHEMA, STATISTICS, parse_manifest
from rotationzoo.artifact.store import CARD, COPY_IT, MANIFEST, PARTS, SIGNATURE, Artifact
from rotationzoo.errors import RotationZooError
from rotationzoo.linalg.moments import Averages
from rotationzoo.report.card import render_card
from rotationzoo.rotations import Rotations
from rotationzoo.storage import files, folders, strict_json
from rotationzoo.storage.files import digest, disk_errors, sha256
from rotationzoo.storage.folders import install, temporary_sibling


def write_artifact(
    folder: Path, rotations: Rotations, statistics: Averages | None, content: dict[str, Any]
) -> Artifact:
    """Write an artifact to a temporary sibling and rename it into place, where it may replace
    another. `content`: the manifest without `schema` and `files`. Raises `RotationZooError` for a
    disk error, and if the folder holds anything but an artifact."""
    with disk_errors(folder), temporary_sibling(folder) as work:
        check_replaceable(folder)  # again: the calibration may have taken hours
        tensors = {ROTATIONS: rotation_tensors(rotations)}
        if statistics is not None:
            tensors[STATISTICS] = statistics_tensors(statistics)
        for name, by_name in tensors.items():
            save_file(by_name, work / name)
            (work / name).chmod(0o644)  # safetensors lets only the owner read
        # The card is not listed: it changes as results are added.
        written = {
            path.name: {"size": path.stat().st_size, "sha256": sha256(path)}
            for path in sorted(work.iterdir())
        }
        content = {"schema": SCHEMA, **content, "files": written}
        _write_manifest_and_card(work, content)
        install(work, folder)
    remember(str(written[ROTATIONS]["sha256"]))
    return Artifact(folder, content)


def remember(identity: str) -> None:
    """Remember, if the disk allows, that this user made or pulled what has this sha256. The
    artifact itself cannot say so: a planted one would say the same."""
    with suppress(OSError, RuntimeError):
        mark = _mark(identity)
        mark.parent.mkdir(0o700, parents=True, exist_ok=True)
        mark.touch()


def is_remembered(artifact: Artifact) -> bool:
    """Whether this user made or pulled the folder's rotations; False if they cannot be read."""
    with suppress(RotationZooError, OSError):
        return is_known(sha256(files.regular_file(artifact.folder, ROTATIONS)))
    return False


def is_known(identity: str) -> bool:
    """Whether what has this sha256 is remembered."""
    with suppress(OSError, RuntimeError):
        return _mark(identity).is_file()
    return False


def forget(identity: str) -> None:
    """Undo `remember`."""
    with suppress(OSError, RuntimeError):
        _mark(identity).unlink()


def _mark(identity: str) -> Path:
    """An empty file: it cannot be damaged, and processes need no lock."""
    return folders.state_folder() / "artifacts" / identity


def add_files(artifact: Artifact, added: dict[str, bytes], metrics: dict[str, Any]) -> Artifact:
    """Add or replace files named in `ADDED`, and add `metrics` to the manifest's. Files that others
    have added are kept; a signature is removed. Readers see the old artifact or the new one. Raises
    `RotationZooError` for a disk error, and if the folder now holds other rotations."""
    folder = artifact.folder.resolve()
    with disk_errors(artifact.folder, COPY_IT), temporary_sibling(folder) as work:
        _check_permission(folder)
        # Another process may have replaced the artifact since it was opened.
        current = Artifact.open(folder)
        if current.identity != artifact.identity:
            problem = f"{artifact.folder} now holds other rotations, and nothing was added"
            raise RotationZooError(problem, "run the command again")
        folders.carry_over(folder, work, {*added, CARD, MANIFEST, SIGNATURE})
        for name, data in added.items():
            folders.write_new(work / name, data)
        written = {
            name: {"size": len(data), "sha256": digest(data)} for name, data in added.items()
        }
        content = current.content | {
            "metrics": current.content["metrics"] | metrics,
            "files": current.content["files"] | written,
        }
        _write_manifest_and_card(work, content)
        was_signed = os.path.lexists(folder / SIGNATURE)
        install(work, folder)
    if was_signed:
        logging.getLogger("rotationzoo").warning(
            "Note: %s is no longer signed: its signature was for the files as they were",
            artifact.folder,
        )
    return Artifact(artifact.folder, content)


def check_writable(artifact: Artifact) -> None:
    """Raise `RotationZooError` if nothing can be added to an artifact."""
    folder = artifact.folder.resolve()
    with disk_errors(artifact.folder, COPY_IT), temporary_sibling(folder):
        _check_permission(folder)


def _check_permission(folder: Path) -> None:
    """Raise `PermissionError` if the folder is not writable: a rename would not check that."""
    if not os.access(folder, os.W_OK):
        raise PermissionError(13, "Permission denied")


def _write_manifest_and_card(work: Path, content: dict[str, Any]) -> None:
    """Write both files. Raises `RotationZooError` for a manifest that could not be read back."""
    manifest = parse_manifest(content, "the manifest")
    folders.write_new(work / CARD, render_card(manifest).encode())
    folders.write_new(work / MANIFEST, strict_json.text(content))


def foreign_files(folder: Path) -> list[str]:
    """The names in an artifact's folder that are unknown, or not of regular files."""
    names = []
    for path in sorted(folder.iterdir()):
        if path.name not in PARTS or path.is_symlink() or not path.is_file():
            names.append(path.name)
    return names


def check_replaceable(folder: Path) -> None:
    """Raise `RotationZooError` unless `folder` is missing, empty, or only holds an artifact."""
    folders.check_name(folder)
    problem = None
    if files.size_of(folder / MANIFEST) is not None:
        if foreign := foreign_files(Artifact.open(folder).folder):
            problem = f"{folder} also holds {foreign[0]}, which is not part of an artifact"
    elif folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        problem = f"{folder} exists and is not an artifact"
    if problem:
        raise RotationZooError(problem, "choose another place with --output")


def library_versions() -> dict[str, str]:
    """The `versions` of a manifest."""
    import transformers

    return {
        "rotationzoo": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
