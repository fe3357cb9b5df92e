"""The checkpoint of an unfinished calibration, and the comparison of two jobs' identities."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save

from rotationzoo.artifact.store import MANIFEST, Artifact
from rotationzoo.errors import RotationZooError
from rotationzoo.linalg.moments import Statistics, from_raw, to_raw
from rotationzoo.storage import files, folders, strict_json
from rotationzoo.words import differing

Identity = Mapping[str, str]
"""All that decides the bytes of a job's result, by key. Keys that do not apply are missing."""


def differences(saved: Mapping[str, Any], present: Identity) -> list[str]:
    """The keys in which a saved identity differs from that of this job."""
    return [key for key in dict.fromkeys([*present, *saved]) if saved.get(key) != present.get(key)]


def asked_recipe(artifact: Artifact) -> str:
    """The hash of the recipe that was asked for; `center_keys` may have been dropped since."""
    manifest = artifact.manifest
    return str(manifest.identity.get("recipe", manifest.recipe_sha256))


def finished_artifact(output: Path, replaces: bool, identity: Identity) -> Artifact | None:
    """The finished artifact of the same job, or None if it is missing, damaged or to be replaced.
    Raises `RotationZooError` for an artifact of another job."""
    if replaces or not (output / MANIFEST).is_file():
        return None
    artifact = Artifact.open(output)
    saved = {**artifact.manifest.identity, "recipe": asked_recipe(artifact)}
    if changed := differences(saved, identity):
        problem = f"{output} holds the work of another job: {differing(changed)}"
        hint = "choose another place with --output, or replace it with --restart"
        raise RotationZooError(problem, hint)
    return None if artifact.damaged_files() else artifact


def damaged(path: Path) -> RotationZooError:
    """The error for a damaged checkpoint."""
    return RotationZooError(f"the checkpoint {path} is damaged", hint="start afresh with --restart")


# A damaged file can fail in any of these ways.
_UNREADABLE = OSError, ValueError, KeyError, TypeError, SafetensorError, RotationZooError
_SHARE = 20  # save once 20 times the duration of the last save has passed
# Assumed bytes per second of the first save. 152 MB (36 layers of 8 heads of 128 channels) took
# 0.4 to 0.7 s.
_SPEED = 2e8


class Checkpoint:
    """The raw sums of an unfinished job, bound to it by its `identity`. They are saved only between
    batches, so a resumed run gives the bytes of an uninterrupted one."""

    def __init__(self, path: Path, identity: Identity):
        self.path, self.identity = path, identity
        self._due: float | None = None

    def read(self, zeros: Statistics) -> tuple[Statistics, int] | None:
        """The saved sums and their number of batches, if any. Raises `RotationZooError`."""
        if files.size_of(self.path) is None:
            return None
        name = str(self.path)
        try:
            with safe_open(self.path, "pt") as file:
                metadata = file.metadata()
            parsed = strict_json.parse(metadata["identity"], name)
            saved = strict_json.validate(dict[str, str], parsed, name)
            done = strict_json.validate(int, strict_json.parse(metadata["done"], name), name)
            sums = load_file(self.path)
        except _UNREADABLE as error:
            raise damaged(self.path) from error
        if changed := differences(saved, self.identity):
            problem = f"the checkpoint {self.path} is of another job: {differing(changed)}"
            hint = "start afresh with --restart, or choose another --output"
            raise RotationZooError(problem, hint)
        finite = all(bool(tensor.isfinite().all()) for tensor in sums.values())
        if _shapes(sums) != _shapes(to_raw(zeros)) or done < 0 or not finite:
            raise damaged(self.path)
        return from_raw(sums), done

    def save(self, statistics: Statistics, done: int, at_once: bool = False) -> bool:
        """Save the sums after `done` batches, `at_once` or if saving takes less than 5 % of the
        time, and return whether they were saved. The first call only starts the clock."""
        if at_once:
            self._due = 0.0
        elif self._due is None:
            moments = (moment for kinds in statistics.values() for moment in kinds.values())
            size = sum(moment.second.nbytes for moment in moments)
            self._due = time.monotonic() + _SHARE * size / _SPEED
        start = time.monotonic()
        if start < self._due:
            return False
        content = {"identity": dict(self.identity), "done": done}
        metadata = {name: json.dumps(value) for name, value in content.items()}
        # In memory, because a killed `save_file` would leave a temporary file behind.
        folders.replace_file(self.path, save(to_raw(statistics), metadata))
        now = time.monotonic()
        self._due = now + _SHARE * (now - start)
        return True

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
