"""The content of imported rotation files: one side as a file holds it, and the pair of sides."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from rotationzoo.engines.base import SideMatrices
from rotationzoo.errors import RotationZooError


@dataclass(frozen=True)
class RotationFile:
    """One side as a file holds it."""

    path: Path
    format: str
    """`V1`, `V2`, `V3`, `tensors`, `MLX` or `GGUF`."""
    side: str | None
    """`key` or `value`; None if neither the file nor its name says which."""
    content: SideMatrices
    calibration: Mapping[str, Any] = field(default_factory=dict)
    """The file's own statement of how it was made."""
    notes: tuple[str, ...] = ()
    descending: bool = False
    """Whether the file lists its largest eigenvalue first."""

    @property
    def transposed(self) -> "RotationFile":
        """The same file with every matrix transposed."""
        matrices = {layer: matrix.mT for layer, matrix in self.content.rotation.items()}
        return replace(self, content=replace(self.content, rotation=matrices))


@dataclass(frozen=True)
class Pair:
    """The key side and the value side of one calibration."""

    key: RotationFile
    value: RotationFile

    def __iter__(self) -> Iterator[RotationFile]:
        return iter((self.key, self.value))

    def items(self) -> Iterator[tuple[str, RotationFile]]:
        """Each side, `key` and `value`, with its file."""
        return iter((("key", self.key), ("value", self.value)))

    @property
    def notes(self) -> list[str]:
        """Remarks on what was converted when the two files were read."""
        return [note for file in self for note in file.notes]


def normalise(file: RotationFile, transposed: bool) -> RotationFile:
    """The file with float32 matrices, applied as `x @ R`, and ascending eigenvalues.

    `transposed` says that the file stores `R^T` against the convention of its format. Raises
    `RotationZooError` for unsorted eigenvalues.
    """
    name = file.path.name
    notes = list(file.notes)
    matrices = dict(file.content.rotation)
    if transposed:
        matrices = {layer: matrix.mT for layer, matrix in matrices.items()}
        notes.append(f"{name} was read as transposed")
    if any(matrix.dtype != torch.float32 for matrix in matrices.values()):
        notes.append(f"{name} is not float32; its matrices were converted")
    matrices = {layer: matrix.float().contiguous() for layer, matrix in matrices.items()}
    eigenvalues = {layer: values.float() for layer, values in file.content.eigenvalues.items()}
    descending = [layer for layer, values in eigenvalues.items() if (values.diff(dim=-1) < 0).any()]
    if descending:
        if any((eigenvalues[layer].diff(dim=-1) > 0).any() for layer in descending):
            raise RotationZooError(
                f"the eigenvalues of layer {descending[0]} in {name} are in no order"
            )
        # The matrices stay as they are: `descending` tells `objectives.describe` to name the
        # composition that makes them from ascending eigenvalues.
        eigenvalues = {layer: values.flip(-1) for layer, values in eigenvalues.items()}
        notes.append(f"{name} has its eigenvalues in descending order; they were reversed")
    content = replace(file.content, rotation=matrices, eigenvalues=eigenvalues)
    return replace(file, content=content, notes=tuple(notes), descending=bool(descending))
