"""One artifact: a folder that is whole or not there, with checksums of everything in it."""

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save, save_file

from rotationzoo import __version__
from rotationzoo.artifact import layout
from rotationzoo.artifact import manifest as manifests
from rotationzoo.artifact.manifest import ROTATIONS, SCHEMA, STATISTICS, Manifest
from rotationzoo.errors import RotationZooError
from rotationzoo.linalg.moments import Averages
from rotationzoo.model.geometry import Geometry, geometry_from_json
from rotationzoo.recipe import Recipe
from rotationzoo.rotations import Rotations
from rotationzoo.storage import files, folders, strict_json
from rotationzoo.storage.files import digest, disk_errors, sha256
from rotationzoo.storage.folders import install, temporary_sibling

MANIFEST, CARD, EVALUATION = "manifest.json", "README.md", "evaluation.json"
ADDED = (EVALUATION, "validation.json", "int2.cu", "spectra.png", "error_by_layer.png")
# An artifact is replaced only where nothing else is in its folder, whatever its manifest claims as
# its own.
PARTS = {ROTATIONS, STATISTICS, MANIFEST, CARD, *ADDED}
_AGAIN = "fetch or make it again"


@dataclass(frozen=True)
class Artifact:
    """An artifact on disk. Tensors are read when asked for."""

    folder: Path
    content: dict[str, Any]
    """`manifest.json` as it is in the file."""
    opened: os.stat_result | None = None
    """The folder that was opened; another of its name may have replaced it since."""

    @classmethod
    def open(cls, folder: Path) -> "Artifact":
        """Raises `RotationZooError` for what is no artifact, one of a newer schema, and a manifest
        that is damaged."""
        folders.recover(folder)
        path = folder / MANIFEST
        if files.size_of(path) is None:
            raise RotationZooError(
                f"{folder} is no artifact: it has no {MANIFEST}",
                hint="make one with: rotationzoo calibrate demo",
            )
        opened = folder.stat()
        return cls(folder, manifests.read(path), opened)

    def foreign_files(self) -> list[str]:
        """Names in the folder that no artifact has, and what is no file under those that it has."""
        paths = sorted(self.folder.iterdir())
        return [
            path.name
            for path in paths
            if path.name not in PARTS or path.is_symlink() or not path.is_file()
        ]

    def check_writable(self) -> None:
        """Raise `RotationZooError` where nothing can be added to the folder."""
        folder = self.folder.resolve()
        with disk_errors(self.folder), temporary_sibling(folder):
            _check_permission(folder)

    @cached_property
    def manifest(self) -> Manifest:
        """`manifest.json`, typed. Raises `RotationZooError` where it is damaged."""
        return manifests.parse(self.content, str(self.folder / MANIFEST))

    @property
    def bound(self) -> bool:
        """Whether it is known which model it was made for; False for imported files until somebody
        names one."""
        return self.manifest.model.config_sha256 is not None

    @property
    def identity(self) -> str:
        """sha256 of `rotations.safetensors`."""
        return self.manifest.files[ROTATIONS].sha256

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe that it was made with, of a search without the clip ratios that were found:
        see `clip_ratios`."""
        return Recipe.model_validate(self.manifest.recipe)

    @cached_property
    def geometry(self) -> Geometry:
        """The attention layers of its model."""
        return geometry_from_json(self.content["geometry"])

    @cached_property
    def rotations(self) -> Rotations:
        """Read when first asked for. Raises `RotationZooError` where they are not those of recipe
        and geometry."""
        return layout.rotations_from(self.rotation_tensors())

    @cached_property
    def statistics(self) -> Averages | None:
        """None where the artifact was made without statistics, or left them behind. Raises as
        `rotations`."""
        tensors = self.statistics_tensors()
        return None if tensors is None else layout.statistics_from(tensors)

    @property
    def clip_ratios(self) -> dict[str, float]:
        """`key` and `value`: the ratios to serve with."""
        return self.manifest.clip_ratios

    def rotation_tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of `rotations.safetensors` by name. Raises as `rotations`."""
        return self._sound(ROTATIONS)

    def statistics_tensors(self) -> dict[str, torch.Tensor] | None:
        """The tensors of `statistics.safetensors` by name, None where there is no such file. Raises
        as `rotations`."""
        return self._sound(STATISTICS) if STATISTICS in self.manifest.files else None

    def examine(self, name: str) -> tuple[dict[str, torch.Tensor], list[str]]:
        """The tensors of a file, and a sentence for all that is wrong with them: nothing is read of
        a file whose names, types or shapes are not those of recipe and geometry. Raises
        `RotationZooError` for what is no such file."""
        path = files.regular_file(self.folder, name)
        expected = layout.expected(
            name, self.recipe, self.geometry, self.manifest.imported is not None
        )
        problems = layout.shape_problems(layout.header(path), *expected)
        try:
            tensors = {} if problems else load_file(path)
        except (OSError, ValueError, SafetensorError) as error:
            raise RotationZooError(f"{path} is damaged: {error}", hint=_AGAIN) from error
        self._check_same(name)
        return tensors, problems or layout.value_problems(tensors)

    def damaged_files(self) -> list[str]:
        """A sentence for each file that is missing, no regular file of the folder, or not the one
        in the manifest."""
        problems = []
        for name, expected in self.manifest.files.items():
            try:
                size = files.size_of(path := files.regular_file(self.folder, name))
            except RotationZooError as error:
                problems.append(str(error))
                continue
            if size != expected.size:
                problems.append(
                    f"{name} is not the file that was written: it has {size} bytes, not {expected.size}"
                )
            elif sha256(path) != expected.sha256:
                problems.append(f"{name} is not the file that was written: its sha256 differs")
        return problems

    def _sound(self, name: str) -> dict[str, torch.Tensor]:
        tensors, problems = self.examine(name)
        if problems:
            raise RotationZooError(
                f"{self.folder / name} is damaged: {problems[0]}",
                hint="see all of it with: rotationzoo verify",
            )
        return tensors

    def _check_same(self, name: str) -> None:
        """Raise `RotationZooError` where another artifact took the folder's place before the file
        was read."""
        if self.opened is None or os.path.samestat(self.opened, self.folder.stat()):
            return
        if Artifact.open(self.folder).manifest.files.get(name) != self.manifest.files.get(name):
            raise RotationZooError(
                f"{self.folder} was replaced while it was read", hint="run the command again"
            )


def write(
    folder: Path,
    rotations: Rotations,
    statistics: Averages | None,
    content: dict[str, Any],
    card: Callable[[Manifest], str],
) -> Artifact:
    """Write a whole artifact to a temporary sibling and rename it into place, replacing one that is
    there.

    `content` is that of the manifest but for `schema` and `files`, which are added here; `card`
    makes the card from the whole of it. Raises `RotationZooError` where the disk refuses, and for
    something in the folder that is no part of an artifact.
    """
    with disk_errors(folder), temporary_sibling(folder) as work:
        check_replaceable(folder)  # hours may have passed since it was checked first
        parts = {ROTATIONS: layout.rotation_tensors(rotations)}
        if statistics is not None:
            parts[STATISTICS] = layout.statistics_tensors(statistics)
        for name, tensors in parts.items():
            save_file(tensors, work / name)
            (work / name).chmod(0o644)  # safetensors makes files that only their owner can read
        known = {
            path.name: {"size": path.stat().st_size, "sha256": sha256(path)}
            for path in sorted(work.iterdir())
        }  # without the card, which is prose that changes with what is known
        content = {"schema": SCHEMA, **content, "files": known}
        _write_words(work, content, card)
        install(work, folder)
    return Artifact(folder, content)


def add(
    artifact: Artifact,
    added: dict[str, bytes],
    metrics: dict[str, Any],
    card: Callable[[Manifest], str],
) -> Artifact:
    """Add files of `ADDED`, or replace earlier ones, and what they say in short to the manifest's
    `metrics`.

    `card` makes the card from the new manifest. What others have added since the artifact was
    opened stays. The folder is replaced whole: a reader finds the artifact as it was, or as it is
    to be. Raises `RotationZooError` where the disk refuses, and where other rotations have taken
    the artifact's place.
    """
    folder = artifact.folder.resolve()
    with disk_errors(artifact.folder), temporary_sibling(folder) as work:
        _check_permission(folder)
        there = Artifact.open(folder)
        if there.identity != artifact.identity:
            raise RotationZooError(
                f"{artifact.folder} holds other rotations by now, and nothing was added",
                hint="run the command again",
            )
        folders.carry_over(folder, work, {*added, CARD, MANIFEST})
        for name, data in added.items():
            files.write_new(work / name, data)
        known = {name: {"size": len(data), "sha256": digest(data)} for name, data in added.items()}
        content = there.content | {
            "metrics": there.content["metrics"] | metrics,
            "files": there.content["files"] | known,
        }
        _write_words(work, content, card)
        install(work, folder)
    return Artifact(artifact.folder, content)


def _write_words(work: Path, content: dict[str, Any], card: Callable[[Manifest], str]) -> None:
    """The manifest and the card. Raises `RotationZooError` for a manifest that nobody could read
    again."""
    manifest = manifests.parse(content, "the manifest")
    files.write_new(work / CARD, card(manifest).encode())
    files.write_new(work / MANIFEST, strict_json.text(content))


def _check_permission(folder: Path) -> None:
    if not os.access(folder, os.W_OK):  # replacing it asks for no permission in the folder itself
        raise PermissionError(13, "Permission denied")


def check_replaceable(folder: Path) -> None:
    """Raise `RotationZooError` unless there is nothing at `folder`, or an artifact and nothing
    else, or no place for one."""
    folders.check_name(folder)
    if files.size_of(folder / MANIFEST) is not None:
        if foreign := Artifact.open(folder).foreign_files():
            raise RotationZooError(
                f"{folder} also holds {foreign[0]}, which is no part of an artifact",
                hint="choose another place with --output",
            )
    elif folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise RotationZooError(
            f"{folder} exists and is no artifact", hint="choose another place with --output"
        )


def write_atomically(
    path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]
) -> None:
    """A safetensors file that replaces `path` whole or not at all. Raises `RotationZooError` where
    the disk refuses.

    Written from memory: `save_file` would leave a temporary file of a random name behind when it is
    killed.
    """
    files.replace(path, save(tensors, metadata=metadata))


def versions() -> dict[str, str]:
    """A manifest's `versions`: of the code that runs, installed or from a path."""
    import transformers

    return {
        "rotationzoo": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
