"""What an unfinished calibration has so far, so that a stopped one goes on where it was."""

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

_OF_TEXT = (
    "config",
    "weights",
    "text",
    "data",
    "sampling",
    "generation_config",
)  # of an identity: what text a model writes
Matrices = dict[tuple[int, str], torch.Tensor]
"""(layer, side) -> rotations `[H, D, D]`."""
_SHARE = 20  # save when the last save took less than 1/20 of the time since


def files(path: Path) -> tuple[Path, ...]:
    """All that a checkpoint called `path` may consist of: what the model wrote, a search, the
    sums."""
    return path.with_suffix(".text.safetensors"), path.with_suffix(".search.safetensors"), path


class Checkpoint:
    """A file of raw sums, one of the texts that the model wrote and one of the layers in which a
    search is through, bound to a job by `identity`: whatever would change a byte of the result.

    They are saved only between batches and layers, so going on gives the bytes of an uninterrupted
    run.
    """

    def __init__(self, path: Path, identity: Identity):
        self.path = path
        self.identity = identity
        self._written, self._searched, _ = files(path)
        self._due = 0.0

    def read(self, zeros: Statistics) -> tuple[Statistics, int] | None:
        """The sums and the number of batches in them, or None; `zeros` are what the sums began
        with. Raises `RotationZooError` if they are of another job, or of other layers and
        shapes."""
        if (found := self._read(self.path, "done", int)) is None:
            return None
        sums, done = found
        shapes = [
            {name: (one.dtype, one.shape) for name, one in raw.items()}
            for raw in (sums, to_raw(zeros))
        ]
        if shapes[0] != shapes[1] or done < 0:
            raise self._damaged(self.path)
        return from_raw(sums), done

    def save(self, statistics: Statistics, done: int) -> None:
        """Save after `done` batches, unless the last save was so recent that saving would cost more
        than 5 % of the time."""
        self._save(self.path, lambda: to_raw(statistics), done=done)

    def read_text(self) -> list[torch.Tensor]:
        """The texts `[T]` that the model wrote. They stay good for a job that differs in what is
        made of them."""
        found, count = self._read(self._written, "texts", int, _OF_TEXT) or ({}, 0)
        texts = [found.get(str(number), torch.empty(())) for number in range(len(found))]
        if count != len(texts) or any((text.dtype, text.ndim) != (torch.long, 1) for text in texts):
            raise self._damaged(self._written)
        return texts

    def save_text(self, texts: Sequence[torch.Tensor]) -> None:
        """Save after a batch of prompts; always, for it took far longer than saving does."""
        self._due = 0.0
        self._save(
            self._written,
            lambda: {str(number): text for number, text in enumerate(texts)},
            texts=len(texts),
        )

    def read_search(self) -> tuple[Matrices, dict[str, Any]]:
        """The matrices of the layers that are done, and what is on record of them."""
        tensors, record = self._read(self._searched, "record", dict[str, ChosenSides]) or ({}, {})
        names = {
            matrix_name(int(layer), side): (int(layer), side) for layer in record for side in SIDES
        }
        if tensors.keys() != names.keys():
            raise self._damaged(self._searched)
        return {place: tensors[name] for name, place in names.items()}, record

    def save_search(self, matrices: Matrices, record: dict[str, Any]) -> None:
        """Save after a layer, as seldom as `save` does."""
        tensors = {matrix_name(*place): matrix for place, matrix in matrices.items()}
        self._save(self._searched, lambda: tensors, record=record)

    def remove(self) -> None:
        for path in reversed(
            files(self.path)
        ):  # sums without their text would be joined to another
            path.unlink(missing_ok=True)

    def _read(
        self, path: Path, what: str, kind: Any, parts: Sequence[str] | None = None
    ) -> tuple[dict[str, torch.Tensor], Any] | None:
        """The tensors, and what of type `kind` is told of them."""
        if size_of(path) is None:
            return None
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata()
            theirs, told = (
                strict_json.parse(metadata[name], str(path)) for name in ("identity", what)
            )
            strict_json.validate(dict[str, str], theirs, str(path))
            strict_json.validate(kind, told, str(path))
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
        if changed := differences(theirs, self.identity, parts):
            raise RotationZooError(
                f"the checkpoint {path} is of another job: {', '.join(changed)} differ",
                hint="start afresh with --restart, or choose another --output",
            )
        return tensors, told

    def _damaged(self, path: Path) -> RotationZooError:
        return RotationZooError(
            f"the checkpoint {path} is damaged", hint="start afresh with --restart"
        )

    def _save(
        self, path: Path, tensors: Callable[[], Mapping[str, torch.Tensor]], **told: Any
    ) -> None:
        start = time.monotonic()
        if start < self._due:
            return
        metadata = {"identity": json.dumps(dict(self.identity))} | {
            name: json.dumps(value) for name, value in told.items()
        }
        replace_tensors(path, dict(tensors()), metadata)
        now = time.monotonic()
        self._due = now + _SHARE * (now - start)
