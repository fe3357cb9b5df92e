"""The checkpoint of an unfinished calibration, from which a stopped run resumes, and the comparison
of two jobs' identities.

An identity is everything that decides the bytes of a result, by key. Each file of a checkpoint has
tensors, and metadata that says which job they belong to.
"""

import glob
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, NonNegativeInt, PositiveInt
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from rotationzoo.errors import RotationZooError
from rotationzoo.linalg.moments import Statistics, from_raw, to_raw
from rotationzoo.model.out_of_memory import RowLimit
from rotationzoo.storage import strict_json
from rotationzoo.storage.files import size_of
from rotationzoo.words import differing
from rotationzoo.writer import replace_tensors

Identity = Mapping[str, str]
"""A job's identity by key. A key that does not apply to the job, such as `device_map`, is left
out."""


def differences(
    saved: Mapping[str, Any], present: Identity, parts: Iterable[str] | None = None
) -> list[str]:
    """The keys in which a saved identity differs from that of the present job.

    `parts` are the keys to compare; None compares all.
    """
    keys = dict.fromkeys([*present, *saved]) if parts is None else parts
    return [key for key in keys if saved.get(key) != present.get(key)]


def read_field(
    path: Path, identity: Identity, field: str, kind: Any, parts: Sequence[str] | None = None
) -> Any:
    """One `field` of a file's metadata, validated as `kind`, which decides whether the field may be
    missing (None). None also if there is no file.

    `parts` are the keys of the job's `identity` that must agree; None means all of them. Raises
    `RotationZooError` if they do not, or if the file is damaged.
    """
    if size_of(path) is None:
        return None
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        saved = strict_json.parse(metadata["identity"], str(path))
        content = strict_json.parse(metadata.get(field, "null"), str(path))
        strict_json.validate(dict[str, str], saved, str(path))
        strict_json.validate(kind, content, str(path))
    # A damaged file can fail in any of these ways.
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        SafetensorError,
        RotationZooError,
    ) as error:
        raise damaged(path) from error
    if changed := differences(saved, identity, parts):
        raise RotationZooError(
            f"the checkpoint {path} is of another job: {differing(changed)}",
            hint="start afresh with --restart, or choose another --output",
        )
    return content


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file. Raises `RotationZooError` if it is damaged."""
    try:
        return load_file(path)
    except (OSError, ValueError, SafetensorError) as error:
        raise damaged(path) from error


def damaged(path: Path) -> RotationZooError:
    """The error of a file whose content is not what `Checkpoint` wrote."""
    return RotationZooError(f"the checkpoint {path} is damaged", hint="start afresh with --restart")


# The parts of a job's identity that decide the text that the model writes.
_TEXT_PARTS = ("config", "weights", "text", "data", "sampling", "generation_config")
_SHARE = 20  # save once 20 times the duration of the last save has passed
# Bytes per second, before a save has shown it. 152 MB, the sums of 36 layers of 8 heads of 128
# channels, took 0.4 to 0.7 s: as long as several batches take on a GPU.
_SPEED = 2e8


def checkpoint_files(path: Path) -> tuple[Path, ...]:
    """The files that a checkpoint at `path` may consist of: texts that the model wrote, and
    sums."""
    return path.with_suffix(".text.safetensors"), path


def rank_file(path: Path, rank: int) -> Path:
    """The main file of the checkpoint of one of several processes, each of which saves its sums.

    That of process 0 is `path` itself.
    """
    return path.with_suffix(f".rank{rank}.safetensors") if rank else path


def rank_files(path: Path) -> list[Path]:
    """The files that processes other than process 0 have saved."""
    return sorted(path.parent.glob(f"{glob.escape(path.stem)}.rank*.safetensors"))


class _SoFar(BaseModel):
    """The state of the run that a file keeps with its tensors."""

    rows: PositiveInt | None = None
    passes: dict[str, NonNegativeInt] = {}


class Checkpoint:
    """The files of a checkpoint, bound to a job by its `identity`.

    One file holds the raw sums, and one the texts that the model wrote. The identity covers
    everything that could change a byte of the result, but for free memory, which decides how many
    rows are computed at a time. Files are saved only between batches, so where as much memory is
    free, a resumed run gives the bytes of an uninterrupted one.
    """

    def __init__(self, path: Path, identity: Identity):
        self.path = path
        self.identity = identity
        self.limit = RowLimit()
        """How many rows of a batch fit the device's memory; saved with every file."""
        self.passes: dict[str, int] = {}
        """Purpose -> tokens that passed through the model so far; saved with every file."""
        self._text_path, _ = checkpoint_files(path)
        self._due: float | None = None

    def of_text(self, fingerprint: str) -> "Checkpoint":
        """The checkpoint of the same job once its text is written, so that sums over another text
        are refused."""
        return Checkpoint(self.path, {**self.identity, "written": fingerprint})

    def resume_counts(self) -> None:
        """Go on with the `limit` and the `passes` of the run that saved sums.

        Raises `RotationZooError` if the file is damaged or of another job.
        """
        content = read_field(self.path, self.identity, "so_far", _SoFar | None)
        so_far = _SoFar(**content or {})
        self.limit.rows = so_far.rows
        self.passes.update(so_far.passes)

    def read(self, zeros: Statistics) -> tuple[Statistics, int] | None:
        """The saved sums and the number of batches in them, or None if nothing was saved.

        `zeros` are the sums that the job starts from. Raises `RotationZooError` if the saved sums
        are of another job, or of other layers or shapes.
        """
        saved = self._read(self.path, "done", int)
        if saved is None:
            return None
        sums, done = saved
        if _shapes(sums) != _shapes(to_raw(zeros)) or done < 0:
            raise damaged(self.path)
        return from_raw(sums), done

    def save(self, statistics: Statistics, done: int, at_once: bool = False) -> bool:
        """Save the sums after `done` batches, and return whether that was done.

        Unless they are to be saved at once, they are saved so seldom that saving takes less than
        5 % of the time. The first call only starts the clock.
        """
        if at_once:
            self._due = 0.0
        elif self._due is None:
            moments = (moment for kinds in statistics.values() for moment in kinds.values())
            size = sum(moment.second.nbytes for moment in moments)
            self._due = time.monotonic() + _SHARE * size / _SPEED
        return self._save(self.path, lambda: to_raw(statistics), {"done": done})

    def read_text(self) -> list[torch.Tensor]:
        """The texts `[T]` that the model wrote so far.

        They stay valid for a job that differs only in what it makes of them.
        """
        tensors, count = self._read(self._text_path, "texts", int, _TEXT_PARTS) or ({}, 0)
        texts = [tensors.get(str(number), torch.empty(())) for number in range(len(tensors))]
        valid = all(text.dtype == torch.long and text.ndim == 1 for text in texts)
        if count != len(texts) or not valid:
            raise damaged(self._text_path)
        return texts

    def save_text(self, texts: Sequence[torch.Tensor]) -> None:
        """Save the texts after each batch of prompts. This never waits, because writing the texts
        took far longer than saving them."""
        self._due = None
        tensors = {str(number): text for number, text in enumerate(texts)}
        self._save(self._text_path, lambda: tensors, {"texts": len(texts)})

    def remove(self) -> None:
        """Remove all files, also of other processes. The sums go first: sums that outlived
        their text would be joined to another."""
        for path in (*rank_files(self.path), *reversed(checkpoint_files(self.path))):
            path.unlink(missing_ok=True)

    def _read(
        self, path: Path, field: str, kind: Any, parts: Sequence[str] | None = None
    ) -> tuple[dict[str, torch.Tensor], Any] | None:
        """The tensors of a file and one `field` of its metadata, as `read_field` returns it; None
        if there is no file."""
        content = read_field(path, self.identity, field, kind, parts)
        return None if content is None else (read_tensors(path), content)

    def _save(
        self,
        path: Path,
        tensors: Callable[[], Mapping[str, torch.Tensor]],
        fields: Mapping[str, Any],
    ) -> bool:
        start = time.monotonic()
        if self._due is not None and start < self._due:
            return False
        so_far = _SoFar(rows=self.limit.rows, passes=self.passes)
        content = {"identity": dict(self.identity), "so_far": so_far.model_dump(), **fields}
        metadata = {name: json.dumps(value) for name, value in content.items()}
        replace_tensors(path, dict(tensors()), metadata)
        now = time.monotonic()
        self._due = now + _SHARE * (now - start)
        return True


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
