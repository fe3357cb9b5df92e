"""One artifact: a folder that is whole or not there, with checksums of everything in it."""

import fcntl
import hashlib
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save, save_file

from rotationzoo import __version__
from rotationzoo.errors import RotationZooError, UsageError

SCHEMA = 1
ROTATIONS, STATISTICS, MANIFEST, CARD = "rotations.safetensors", "statistics.safetensors", "manifest.json", "README.md"
_REQUIRED = {
    "model": dict, "geometry": list, "recipe": dict, "recipe_sha256": str, "identity": dict, "files": dict, "run": dict,
    "metrics": dict, "versions": dict,
}  # fmt: skip


@dataclass(frozen=True)
class Artifact:
    """An artifact on disk. Tensors are read when asked for."""

    folder: Path
    manifest: dict[str, Any]

    @classmethod
    def open(cls, folder: Path) -> "Artifact":
        """Raises `RotationZooError` for what is no artifact, or one of a newer schema."""
        path = folder / MANIFEST
        if not path.is_file():
            raise RotationZooError(
                f"{folder} is no artifact: it has no {MANIFEST}", hint="make one with: rotationzoo calibrate demo"
            )
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
            schema = manifest["schema"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RotationZooError(f"{path} is damaged: it is no JSON with a schema") from error
        if schema != SCHEMA:
            raise RotationZooError(
                f"{folder} has schema {schema}; this rotationzoo reads schema {SCHEMA}", hint="upgrade rotationzoo"
            )
        for key, kind in _REQUIRED.items():
            if not isinstance(manifest.get(key), kind):
                raise RotationZooError(f"{path} is damaged: it has no {key}", hint="fetch or make the artifact again")
        return cls(folder, manifest)

    def foreign_files(self) -> list[str]:
        """Names in the folder that the artifact does not know."""
        known = {*self.manifest["files"], MANIFEST, CARD}
        return sorted(path.name for path in self.folder.iterdir() if path.name not in known)

    def check_writable(self) -> None:
        """Raise `RotationZooError` where nothing can be added to the folder."""
        probe = self.folder / ".probe.partial"
        with disk_errors(self.folder):
            probe.write_bytes(b"")
            probe.unlink()

    @property
    def bound(self) -> bool:
        """Whether it is known which model it was made for; False for imported files until somebody names one."""
        return self.manifest["model"].get("config_sha256") is not None

    @property
    def identity(self) -> str:
        """sha256 of `rotations.safetensors`."""
        return self.manifest["files"][ROTATIONS]["sha256"]

    def rotations(self) -> dict[str, torch.Tensor]:
        return self._tensors(ROTATIONS)

    def statistics(self) -> dict[str, torch.Tensor] | None:
        """None where the artifact was made without statistics, or left them behind."""
        return self._tensors(STATISTICS) if (self.folder / STATISTICS).is_file() else None

    def _tensors(self, name: str) -> dict[str, torch.Tensor]:
        try:
            return load_file(self.folder / name)
        except (OSError, ValueError, SafetensorError) as error:
            raise RotationZooError(f"{self.folder / name} is damaged: {error}", hint="fetch or make it again") from error

    def damaged_files(self) -> list[str]:
        """A sentence for each file that is missing or differs from its checksum in the manifest."""
        problems = []
        for name, expected in self.manifest["files"].items():
            path = self.folder / name
            if not path.is_file():
                problems.append(f"{name} is missing")
            elif sha256(path) != expected["sha256"]:
                problems.append(f"{name} is not the file that was written: its sha256 differs")
        return problems


def write(
    folder: Path,
    rotations: dict[str, torch.Tensor],
    statistics: dict[str, torch.Tensor] | None,
    manifest: dict[str, Any],
    card: Callable[[dict[str, Any]], str],
) -> Artifact:
    """Write a whole artifact to a temporary sibling and rename it into place, replacing one that is there.

    `manifest` lacks `schema` and `files`, which are added here; `card` makes the card from the whole of it.
    Raises `RotationZooError` where the disk refuses.
    """
    with disk_errors(folder), temporary_sibling(folder) as work:
        for name, tensors in ((ROTATIONS, rotations), (STATISTICS, statistics)):
            if tensors is not None:
                save_file(tensors, work / name)
                (work / name).chmod(0o644)  # safetensors makes files that only their owner can read
        files = {
            path.name: {"size": path.stat().st_size, "sha256": sha256(path)} for path in sorted(work.iterdir())
        }  # without the card, which is prose that changes with what is known
        manifest = {"schema": SCHEMA, **manifest, "files": files}
        (work / CARD).write_text(card(manifest), encoding="utf-8")
        (work / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        install(work, folder)
    return Artifact(folder, manifest)


def add(
    artifact: Artifact, files: dict[str, bytes], metrics: dict[str, Any], card: Callable[[dict[str, Any]], str]
) -> Artifact:
    """Add files, or replace earlier ones, and what they say in short to the manifest's `metrics`.

    `card` makes the card from the new manifest. Each file is replaced whole, the manifest last: until then a reader finds the
    artifact as it was. Raises `RotationZooError` where the disk refuses.
    """
    known = {name: {"size": len(data), "sha256": digest(data)} for name, data in files.items()}
    manifest = artifact.manifest | {
        "metrics": artifact.manifest["metrics"] | metrics,
        "files": artifact.manifest["files"] | known,
    }
    text = {CARD: card(manifest), MANIFEST: json.dumps(manifest, indent=2) + "\n"}
    written = files | {name: content.encode() for name, content in text.items()}
    partial = {name: artifact.folder / f".{name}.partial" for name in written}
    try:
        with disk_errors(artifact.folder):
            for name, data in written.items():  # all on the disk before any is replaced: a full disk changes nothing
                partial[name].write_bytes(data)
            for name in written:
                os.replace(partial[name], artifact.folder / name)
    finally:
        for path in partial.values():
            path.unlink(missing_ok=True)
    return Artifact(artifact.folder, manifest)


@contextmanager
def temporary_sibling(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder`, on the same file system so that a rename is atomic; gone at the end if still there.

    Its name is fixed, so that the next run clears away what a killed one left; it is locked, so that two runs do not share it.
    Raises `RotationZooError` where another process holds it.
    """
    work = folder.with_name(f".{folder.name}.partial")
    work.mkdir(parents=True, exist_ok=True)
    held = os.open(work, os.O_RDONLY)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RotationZooError(
                f"another process is writing {folder}", hint="run the command again when it is done"
            ) from error
        for path in work.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)
    finally:
        os.close(held)


def install(work: Path, folder: Path) -> None:
    """Put `work` in the place of `folder`, by rename; what was there is given up only afterwards."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    old = _set_aside(folder)
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    try:
        work.rename(folder)
    except OSError:
        recover(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def check_name(folder: Path) -> None:
    """Raise `UsageError` for a path that names no folder of its own, such as `.`."""
    if folder.name in ("", ".."):
        raise UsageError(f"{folder} is no folder that an artifact can replace", hint="name a new folder with --output")


def check_replaceable(folder: Path) -> None:
    """Raise `RotationZooError` unless there is nothing at `folder`, or an artifact and nothing else, or no place for one."""
    check_name(folder)
    if (folder / MANIFEST).is_file():
        if foreign := Artifact.open(folder).foreign_files():
            raise RotationZooError(
                f"{folder} also holds {foreign[0]}, which is no part of an artifact", hint="choose another place with --output"
            )
    elif folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise RotationZooError(f"{folder} exists and is no artifact", hint="choose another place with --output")


def recover(folder: Path) -> None:
    """Put back what a run that was killed while replacing it had set aside."""
    if _set_aside(folder).exists() and not folder.exists():
        _set_aside(folder).rename(folder)


def _set_aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a full or read-only disk into one sentence; safetensors reports such errors as its own exception."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RotationZooError(
            f"{path} cannot be written: {reason}", hint="make room, or choose another place with --output"
        ) from error


def write_atomically(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """A safetensors file that replaces `path` whole or not at all. Raises `RotationZooError` where the disk refuses.

    Written from memory: `save_file` would leave a temporary file of a random name behind when it is killed.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(save(tensors, metadata=metadata))
            os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def versions() -> dict[str, str]:
    """A manifest's `versions`: of the code that runs, installed or from a path."""
    import transformers

    return {
        "rotationzoo": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def clip_ratios(manifest: dict[str, Any]) -> dict[str, float]:
    """`key` and `value`: the ratios to serve with, which a search finds and any other recipe says."""
    if "search" in manifest:
        return {side: manifest["search"]["model"][side]["clip"] for side in ("key", "value")}
    return {side: manifest["recipe"][f"{side}_clip"] for side in ("key", "value")}


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
