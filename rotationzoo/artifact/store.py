"""Reads an artifact, and checks its files against their checksums."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rotationzoo.artifact import layout
from rotationzoo.artifact.manifest import ROTATIONS, SCHEMA, STATISTICS, Manifest, parse_manifest
from rotationzoo.errors import RotationZooError
from rotationzoo.geometry import Geometry, geometry_from_json
from rotationzoo.linalg.moments import Averages
from rotationzoo.recipe import Recipe
from rotationzoo.rotations import Rotations
from rotationzoo.storage import files, strict_json
from rotationzoo.storage.files import sha256
from rotationzoo.storage.folders import read_settled
from rotationzoo.words import nearest

if TYPE_CHECKING:
    from rotationzoo.artifact.measured import Measured

MANIFEST, CARD, EVALUATION = "manifest.json", "README.md", "evaluation.json"
ANSWERS, REPORT = "answers.png", "report.html"
ADDED = EVALUATION, "validation.json", "int2.cu", ANSWERS, REPORT
SIGNATURE = "model.sig"
"""The signature of the manifest and of the files that it lists."""
EXPORT = "export.json"
"""What `export` writes about the files for an engine."""
COPY_IT = "copy the artifact to another disk"  # where nothing can be added to it
# A folder with any other file is never replaced. Older releases wrote the last name.
PARTS = {ROTATIONS, STATISTICS, MANIFEST, CARD, SIGNATURE, *ADDED, "feedback.cu"}
Examined = tuple[dict[str, torch.Tensor], list[str]]
"""The tensors and problems of a file."""


@dataclass(frozen=True, repr=False)
class Artifact:
    """An artifact on disk. Each tensor file is read once, when it is first needed."""

    folder: Path
    content: dict[str, Any]
    """The content of `manifest.json`, as it is in the file."""
    hashes: dict[str, str] = field(default_factory=dict, compare=False)
    """The sha256 of each file that has been hashed so far."""
    _examined: dict[str, Examined] = field(default_factory=dict, compare=False)

    @classmethod
    def open(cls, folder: str | Path, hashes: Mapping[str, str] | None = None) -> "Artifact":
        """Open an artifact without reading its tensors. `hashes`: name -> sha256 of files that the
        caller has just hashed. Raises `RotationZooError` unless it has a valid manifest."""
        folder = Path(folder)
        files.check_utf8(folder)
        content = read_settled(folder, partial(_read_manifest, folder))
        return cls(folder, content, dict(hashes or {}))

    def __repr__(self) -> str:
        return f"Artifact({str(self.folder)!r})"

    @cached_property
    def manifest(self) -> Manifest:
        """The typed manifest. Raises `RotationZooError` if it is damaged."""
        return parse_manifest(self.content, str(self.folder / MANIFEST))

    @property
    def identity(self) -> str:
        """The sha256 of `rotations.safetensors`."""
        return self.manifest.rotations_sha256

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe that it was made with."""
        return Recipe.model_validate(self.manifest.recipe)

    @cached_property
    def geometry(self) -> Geometry:
        """The attention layers of the model that it was made for."""
        return geometry_from_json(self.content["geometry"])

    @cached_property
    def rotations(self) -> Rotations:
        """The rotations by layer. Raises `RotationZooError` if they do not fit the recipe and the
        geometry, are not orthogonal, or do not have the manifest's sha256."""
        return layout.rotations_from(self._sound_tensors(ROTATIONS))

    @cached_property
    def statistics(self) -> Averages | None:
        """The averages by layer and kind, or None if there are none. Raises as `rotations`."""
        if STATISTICS not in self.manifest.files:
            return None
        return layout.statistics_from(self._sound_tensors(STATISTICS))

    @cached_property
    def measured(self) -> "Measured | None":
        """The evaluation from `evaluate --save`, or None. Raises `RotationZooError` for a damaged
        file, and for one about other rotations."""
        if EVALUATION not in self.manifest.files:
            return None
        # Not at the top: a server reads only rotations.
        from rotationzoo.artifact.measured import Measured, served_arm

        path = files.regular_file(self.folder, EVALUATION)
        measured = strict_json.validate(Measured, strict_json.read(path), str(path))
        for window in measured.windows:
            if served_arm(window.arms, self.identity, measured.format) is None:
                raise RotationZooError(f"{path} is damaged: it has no figures of these rotations")
        return measured

    def examine(self, name: str) -> Examined:
        """The tensors and problems of a file, from `read_tensors`."""
        if name not in self._examined:
            required = layout.statistics_layout(self.recipe, self.geometry)
            if name == ROTATIONS:
                imported = self.manifest.imported is not None
                required = layout.rotation_layout(self.recipe, self.geometry, imported)

            def read() -> Examined:
                examined = layout.read_tensors(files.regular_file(self.folder, name), required)
                self._check_same(name)
                return examined

            self._examined[name] = read_settled(self.folder, read)
        return self._examined[name]

    def damaged_files(self) -> list[str]:
        """One sentence for each file that is missing or differs from the manifest."""
        return [problem for name in self.manifest.files for problem in self._damage(name)]

    def _damage(self, name: str) -> list[str]:
        try:
            read_settled(self.folder, partial(self._check_file, name))
        except RotationZooError as error:
            return [str(error)]
        return []

    def _check_file(self, name: str) -> None:
        """Raise `RotationZooError` for a file that differs from the manifest."""
        expected = self.manifest.files[name]
        path = files.regular_file(self.folder, name)
        size, other = files.size_of(path), f"{name} is not the file that was written"
        if size != expected.size:  # much quicker to compare than hashes
            raise RotationZooError(f"{other}: it has {size} bytes, not {expected.size}")
        if name not in self.hashes:
            self.hashes[name] = sha256(path)
        if self.hashes[name] != expected.sha256:
            raise RotationZooError(f"{other}: its sha256 differs")

    def _sound_tensors(self, name: str) -> dict[str, torch.Tensor]:
        tensors, problems = self.examine(name)
        # Not in `examine`: `verify` itself says by how much they are not orthogonal.
        if name == ROTATIONS and not problems:
            bent = layout.orthogonality_problems(tensors, bool(self.manifest.imported))
            problems = layout.sentences(bent)
        if problems := problems or self._damage(name):
            hint = f"see all problems with: rotationzoo verify {shlex.quote(str(self.folder))}"
            raise RotationZooError(f"{self.folder / name} is damaged: {problems[0]}", hint)
        return tensors

    def _check_same(self, name: str) -> None:
        """Raise `RotationZooError` if another artifact has replaced this one since it was opened.
        The manifests are compared, because a new folder may reuse the inode number."""
        if Artifact.open(self.folder).manifest.files.get(name) != self.manifest.files.get(name):
            problem = f"{self.folder} was replaced while it was read"
            raise RotationZooError(problem, "run the command again")


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if files.size_of(path) is None:
        if files.size_of(folder / EXPORT) is not None:
            problem = f"{folder} holds exported files for an engine, and is not an artifact"
            raise RotationZooError(problem, "name the artifact that they were exported from")
        if files.size_of(folder / "config.json") is not None:
            hint = f"make them with: rotationzoo calibrate {folder}"
            raise RotationZooError(f"{folder} is a model, and has no rotations", hint)
        reason, hint = f"it has no {MANIFEST}", "make one with: rotationzoo calibrate MODEL"
        if inside := sorted(str(path.parent) for path in folder.glob(f"*/{MANIFEST}")):
            hint = f"name one of the artifacts in it, such as {inside[0]}"
        if not folder.exists():
            siblings = [path.name for path in folder.parent.glob("*") if path.is_dir()]
            meant = nearest(folder.name, siblings)
            reason = f"there is no such folder{meant}"
            hint = "name the folder that calibrate wrote" if meant else hint
        raise RotationZooError(f"{folder} is not an artifact: {reason}", hint=hint)
    content: Any = strict_json.read(path)
    hint = "fetch or make the artifact again"
    strict_json.check_schema(content, SCHEMA, str(folder), f"{path} is damaged", hint)
    parse_manifest(content, str(path))
    return dict(content)
