"""The answers of an unfinished evaluation, so that a stopped one asks no question twice.

An answer is found by a digest of everything that decides it, so those of another job are not read.
"""

import hashlib
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from rotationzoo.recall.answers import Answers
from rotationzoo.recall.prompts import Prompt
from rotationzoo.storage import folders


class SavedAnswers:
    """Answers in the file `path`, or nowhere if that is None. `conditions`: what decides them
    beside the prompts and who answers."""

    def __init__(self, path: Path | None = None, conditions: str = ""):
        self.path, self._conditions = path, conditions
        self._tensors: dict[str, torch.Tensor] = {}
        if path is not None:
            with suppress(OSError, SafetensorError):  # without the file, all is asked again
                self._tensors = load_file(path)

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
            folders.replace_file(self.path, save(self._tensors))

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
