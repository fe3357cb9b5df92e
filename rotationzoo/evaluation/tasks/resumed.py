"""The answers of an unfinished evaluation, so that a stopped one asks no question twice.

An answer is found by a digest of everything that decides it, so those of another job are not read.
The file is sealed with a key of this user, so those that somebody else put there are not, either.
"""

import hashlib
import hmac
import os
from pathlib import Path

import torch
from safetensors.torch import load, save

from rotationzoo.recall.answers import Answers
from rotationzoo.recall.prompts import Prompt
from rotationzoo.storage import files, folders
from rotationzoo.storage.disks import disk_errors

_SEAL = "seal"
_LIMIT = 1 << 28  # bytes; 100,000 questions of seven tasks have 6 MB for each who answers


class SavedAnswers:
    """Answers in the file `path`, or nowhere if that is None. `conditions`: what decides them
    beside the prompts and who answers."""

    def __init__(self, path: Path | None = None, conditions: str = ""):
        self.path, self._conditions = path, conditions
        self.notes: list[str] = []
        """What became of a file that was not used."""
        self._tensors: dict[str, torch.Tensor] = {}
        if (
            path is None or files.size_of(path) is None
        ):  # raises for a pipe, which would be waited for
            return
        try:
            tensors = load(files.read(path, _LIMIT))
            if tensors.pop(_SEAL).tolist() != list(_seal(tensors)):
                raise ValueError
            self._tensors = tensors
        except Exception:  # a damaged file fails in many ways
            aside = path.with_name(f"{path.name}.old")
            with disk_errors(path):
                os.replace(path, aside)
            self.notes = [
                f"{path} is damaged, or not of this user, and now {aside.name}: all is asked"
            ]

    def find(self, reader: object, prompts: list[Prompt]) -> Answers | None:
        """The answers of a reader to the questions of these prompts, if they are saved."""
        correct, log_probability = map(self._tensors.get, self._names(reader, prompts))
        if correct is None or log_probability is None:
            return None
        return Answers(correct, log_probability)

    def save(self, reader: object, prompts: list[Prompt], answers: Answers) -> None:
        """Save answers. Raises `RotationZooError` where the disk refuses."""
        if self.path is not None:
            names = self._names(reader, prompts)
            parts = answers.correct, answers.log_probability
            self._tensors.update(zip(names, parts, strict=True))
            seal = torch.tensor(list(_seal(self._tensors)), dtype=torch.uint8)
            folders.replace_file(self.path, save({**self._tensors, _SEAL: seal}))

    def leave(self) -> str:
        """Keep the file for the next evaluation; how to go on, after a semicolon."""
        path, self.path = self.path, None
        return "" if path is None else "; the same command goes on"

    def remove(self) -> None:
        """Remove the file, unless it was left."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _names(self, reader: object, prompts: list[Prompt]) -> tuple[str, str]:
        digest = hashlib.sha256(f"{self._conditions} {reader}".encode())
        for prompt in prompts:
            digest.update(f"{prompt.questions}".encode())
            digest.update(prompt.ids.numpy().tobytes())
        return f"{digest.hexdigest()}.correct", f"{digest.hexdigest()}.log_probability"


def _seal(tensors: dict[str, torch.Tensor]) -> bytes:
    return hmac.digest(folders.user_key(), save(tensors), "sha256")
