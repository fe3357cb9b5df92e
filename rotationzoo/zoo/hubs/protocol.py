"""What a hub can do, and patience with it."""

import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rotationzoo.errors import HubError
from rotationzoo.network.limits import LARGE

T = TypeVar("T")
SPELLING = "check the spelling of the repository and the revision"
_ATTEMPTS = 4
_PAUSE = 1.0  # seconds before the second attempt; doubled each time


@dataclass(frozen=True)
class Published:
    """Where published files are: a revision that does not move, and the page of the commit or pull
    request."""

    revision: str
    url: str
    changed: bool
    """False if the repository held the very same files already."""


@dataclass(frozen=True)
class Listed:
    """What a hub says of a file; `sha256` where it tells it."""

    size: int
    sha256: str | None


class Hub(ABC):
    """One hub. Every method raises `HubError`, in one sentence, for what the hub or the network
    refuses."""

    name: str

    @abstractmethod
    def resolve(self, repo: str, revision: str | None = None) -> str:
        """The revision that a branch, tag or None (the newest) stands for, to read from."""

    @abstractmethod
    def list_files(self, repo: str, revision: str | None) -> dict[str, Listed]:
        """Path -> size and hash of every file."""

    @abstractmethod
    def fetch(
        self, repo: str, revision: str | None, sizes: Mapping[str, int], folder: Path
    ) -> None:
        """Download these files into `folder`, under the same paths, and no more of each than its
        size."""

    @abstractmethod
    def publish(
        self,
        repo: str,
        files: Mapping[str, Path | bytes],
        message: str,
        parent: str | None,
        tag: str,
        create_pr: bool,
    ) -> Published:
        """Put files into a repository, made if it is not there, in one step that readers see whole
        or not at all.

        `parent` is the head that the files were made for: raises `StaleParent` if the repository
        has moved on since.
        """

    def read(self, repo: str, revision: str | None, path: str) -> bytes | None:
        """One small file, or None if the revision has none of that name. Raises `HubError` for a
        large one."""
        with tempfile.TemporaryDirectory() as scratch:
            try:
                self.fetch(repo, revision, {path: LARGE}, Path(scratch))
            except HubError as error:
                if error.missing:
                    return None
                raise
            return (Path(scratch) / path).read_bytes()


def patiently(call: Callable[[], T], passing: Callable[[Exception], bool]) -> T:
    """Repeat a call whose failure may pass, a few times and more and more slowly."""
    for attempt in range(_ATTEMPTS - 1):
        try:
            return call()
        except Exception as error:
            if isinstance(error, HubError) or not passing(error):
                raise
            time.sleep(_PAUSE * 2**attempt)
    return call()
