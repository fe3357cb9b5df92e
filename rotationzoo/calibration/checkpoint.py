"""What an unfinished calibration has so far, so that a stopped run can go on from there."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from rotationzoo.artifact.layout import matrix_name
from rotationzoo.artifact.results import ChosenSides
from rotationzoo.artifact.writer import replace_tensors
from rotationzoo.calibration.identity import Identity, differences
from rotationzoo.errors import RotationZooError
from rotationzoo.linalg.moments import Statistics, from_raw, to_raw
from rotationzoo.rotations import SIDES
from rotationzoo.storage import strict_json
from rotationzoo.storage.files import size_of

# The parts of an identity on which the text that a model writes depends.
_TEXT_PARTS = ("config", "weights", "text", "data", "sampling", "generation_config")
_SHARE = 20  # save when the last save took less than 1/20 of the time since

Matrices = dict[tuple[int, str], torch.Tensor]
"""(layer, side) -> rotations `[H, D, D]`."""


def checkpoint_files(path: Path) -> tuple[Path, ...]:
    """The files that a checkpoint called `path` may consist of: texts that the model wrote, a
    search, the sums."""
    return path.with_suffix(".text.safetensors"), path.with_suffix(".search.safetensors"), path


class Checkpoint:
    """A file of raw sums, one of the texts that the model wrote, and one of the layers that a
    search has finished, bound to a job by `identity`: whatever would change a byte of the result.

    They are saved only between batches and layers, so going on gives the bytes of an uninterrupted
    run.
    """

    def __init__(self, path: Path, identity: Identity):
        self.path = path
        self.identity = identity
        self._text_path, self._search_path, _ = checkpoint_files(path)
        self._due = 0.0

    def of_text(self, fingerprint: str) -> "Checkpoint":
        """The checkpoint of the same job once its text is written: sums of another text are not
        this job's."""
        return Checkpoint(self.path, {**self.identity, "written": fingerprint})

    def read(self, zeros: Statistics) -> tuple[Statistics, int] | None:
        """The sums and the number of batches in them, or None; `zeros` are what the sums began
        with.

        Raises `RotationZooError` if they are of another job, or of other layers and shapes.
        """
        saved = self._read(self.path, "done", int)
        if saved is None:
            return None
        sums, done = saved
        if _shapes(sums) != _shapes(to_raw(zeros)) or done < 0:
            raise self._damaged(self.path)
        return from_raw(sums), done

    def save(self, statistics: Statistics, done: int) -> None:
        """Save after `done` batches, unless the last save was so recent that saving would cost more
        than 5 % of the time."""
        self._save(self.path, lambda: to_raw(statistics), {"done": done})

    def read_text(self) -> list[torch.Tensor]:
        """The texts `[T]` that the model wrote. They stay good for a job that differs in what is
        made of them."""
        tensors, count = self._read(self._text_path, "texts", int, _TEXT_PARTS) or ({}, 0)
        texts = [tensors.get(str(number), torch.empty(())) for number in range(len(tensors))]
        valid = all(text.dtype == torch.long and text.ndim == 1 for text in texts)
        if count != len(texts) or not valid:
            raise self._damaged(self._text_path)
        return texts

    def save_text(self, texts: Sequence[torch.Tensor]) -> None:
        """Save after a batch of prompts; always, since writing it took far longer than saving."""
        self._due = 0.0
        tensors = {str(number): text for number, text in enumerate(texts)}
        self._save(self._text_path, lambda: tensors, {"texts": len(texts)})

    def read_search(self) -> tuple[Matrices, dict[str, Any]]:
        """The matrices of the finished layers, and what is on record of them."""
        kind = dict[str, ChosenSides]
        tensors, record = self._read(self._search_path, "record", kind) or ({}, {})
        names = {
            (int(layer), side): matrix_name(int(layer), side) for layer in record for side in SIDES
        }
        if tensors.keys() != set(names.values()):
            raise self._damaged(self._search_path)
        return {place: tensors[name] for place, name in names.items()}, record

    def save_search(self, matrices: Matrices, record: dict[str, Any]) -> None:
        """Save after a layer, as seldom as `save` does."""
        tensors = {matrix_name(*place): matrix for place, matrix in matrices.items()}
        self._save(self._search_path, lambda: tensors, {"record": record})

    def remove(self) -> None:
        """Remove all files. The sums go first: without their text they would be joined to
        another."""
        for path in reversed(checkpoint_files(self.path)):
            path.unlink(missing_ok=True)

    def _read(
        self, path: Path, field: str, kind: Any, parts: Sequence[str] | None = None
    ) -> tuple[dict[str, torch.Tensor], Any] | None:
        """The tensors of a file and a `field` of its metadata, which is of type `kind`; None where
        there is no file. `parts` are those of the identity that must agree; None: all."""
        if size_of(path) is None:
            return None
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata()
            identity = strict_json.parse(metadata["identity"], str(path))
            content = strict_json.parse(metadata[field], str(path))
            strict_json.validate(dict[str, str], identity, str(path))
            strict_json.validate(kind, content, str(path))
            tensors = load_file(path)
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            SafetensorError,
            RotationZooError,
        ) as error:
            raise self._damaged(path) from error
        if changed := differences(identity, self.identity, parts):
            raise RotationZooError(
                f"the checkpoint {path} is of another job: {', '.join(changed)} differ",
                hint="start afresh with --restart, or choose another --output",
            )
        return tensors, content

    def _damaged(self, path: Path) -> RotationZooError:
        return RotationZooError(
            f"the checkpoint {path} is damaged", hint="start afresh with --restart"
        )

    def _save(
        self,
        path: Path,
        tensors: Callable[[], Mapping[str, torch.Tensor]],
        fields: Mapping[str, Any],
    ) -> None:
        start = time.monotonic()
        if start < self._due:
            return
        content = {"identity": dict(self.identity), **fields}
        metadata = {name: json.dumps(value) for name, value in content.items()}
        replace_tensors(path, dict(tensors()), metadata)
        now = time.monotonic()
        self._due = now + _SHARE * (now - start)


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
