"""The answers of an unfinished evaluation, so that no question is asked again after a stop. A file
is read only if this user's command wrote exactly these bytes: nobody else may decide."""

import hashlib
import os
from pathlib import Path

import torch
from safetensors.torch import load, save

from rotationzoo.recall.prompts import Answers, Prompt
from rotationzoo.storage import files, folders
from rotationzoo.storage.files import disk_errors
from rotationzoo.writer import forget, is_known, remember

_LIMIT = 1 << 28  # bytes; 100,000 questions of seven tasks take 6 MB per arm


class SavedAnswers:
    """Answers in the file `path`, or in memory if that is None. `conditions`: all that determines
    them, except the prompts and the reader."""

    def __init__(self, path: Path | None = None, conditions: str = ""):
        self.path, self._conditions = path, conditions
        self._tensors: dict[str, torch.Tensor] = {}
        self.was_left = False
        self.notes: list[str] = []  # what became of a file that was not used
        self._digest = ""
        # Raises for a pipe, which would never end.
        if path is None or (size := files.size_of(path)) is None:
            return
        data = files.read(path, _LIMIT) if size <= _LIMIT else b""
        self._digest = files.digest(data)
        if is_known(self._digest):
            self._tensors = load(data)
            return
        with disk_errors(path):
            os.replace(path, aside := path.with_name(f"{path.name}.old"))
        self.notes = [f"{path} is damaged, or was not written here: it is {aside.name} now"]

    def find(self, reader: object, prompts: list[Prompt]) -> Answers | None:
        """The saved answers of a reader to these prompts."""
        correct, log_probability = map(self._tensors.get, self._names(reader, prompts))
        if correct is None or log_probability is None:
            return None
        return Answers(correct, log_probability)

    def save(self, reader: object, prompts: list[Prompt], answers: Answers) -> None:
        """Save answers. Raises `RotationZooError` for disk errors."""
        parts = answers.correct, answers.log_probability
        self._tensors.update(zip(self._names(reader, prompts), parts, strict=True))
        if self.path is not None:
            data, before = save(self._tensors), self._digest
            remember(digest := files.digest(data))
            folders.replace_file(self.path, data)
            forget(before)
            self._digest = digest

    def leave(self) -> str:
        """Keep the file for the next evaluation. Returns how to go on, after a semicolon."""
        path, self.path, self.was_left = self.path, None, True
        return "" if path is None else "; the same command goes on"

    def remove(self) -> None:
        """Remove the file, unless it was left."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
            forget(self._digest)

    def _names(self, reader: object, prompts: list[Prompt]) -> tuple[str, str]:
        """Digests of all that determines the answers, so that other jobs do not find them."""
        digest = hashlib.sha256(f"{self._conditions} {reader}".encode())
        for prompt in prompts:
            digest.update(f"{prompt.questions}".encode())
            digest.update(prompt.ids.numpy().tobytes())
        return f"{digest.hexdigest()}.correct", f"{digest.hexdigest()}.log_probability"
