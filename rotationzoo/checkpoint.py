"""The sums of an unfinished calibration, so that a stopped one goes on where it was."""

import json
import time
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from rotationzoo.artifact import write_atomically
from rotationzoo.errors import RotationZooError
from rotationzoo.moments import Statistics, from_raw, to_raw

_SHARE = 20  # save when the last save took less than 1/20 of the time since


class Checkpoint:
    """One file of raw sums, bound to a job by `identity`: whatever would change a byte of the result.

    Sums are saved only between batches, so going on gives the bytes of an uninterrupted run.
    """

    def __init__(self, path: Path, identity: dict[str, str]):
        self.path = path
        self.identity = identity
        self._due = 0.0

    def read(self) -> tuple[Statistics, int] | None:
        """The sums and the number of batches in them, or None. Raises `RotationZooError` if they are of another job."""
        if not self.path.is_file():
            return None
        try:
            with safe_open(self.path, "pt") as file:
                metadata = file.metadata()
            theirs, done = json.loads(metadata["identity"]), int(metadata["done"])
            tensors = load_file(self.path)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise RotationZooError(f"the checkpoint {self.path} is damaged", hint="start afresh with --restart") from error
        if changed := [key for key, value in self.identity.items() if theirs.get(key) != value]:
            raise RotationZooError(
                f"the checkpoint {self.path} is of another job: {', '.join(changed)} differ",
                hint="start afresh with --restart, or choose another --output",
            )
        return from_raw(tensors), done

    def save(self, statistics: Statistics, done: int) -> None:
        """Save after `done` batches, unless the last save was so recent that saving would cost more than 5 % of the time."""
        start = time.monotonic()
        if start < self._due:
            return
        metadata = {"identity": json.dumps(self.identity), "done": str(done)}
        write_atomically(self.path, to_raw(statistics), metadata)
        now = time.monotonic()
        self._due = now + _SHARE * (now - start)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
