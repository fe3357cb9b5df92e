"""What a hub can do, and patience with it."""

import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rotationzoo.errors import HubError

T = TypeVar("T")
NETWORK = "check the network, then run the same command again"
SPELLING = "check the spelling of the repository and the revision"
_ATTEMPTS = 4
_PAUSE = 1.0  # seconds before the second attempt; doubled each time


@dataclass(frozen=True)
class Published:
    """Where published files are: a revision that does not move, and the page of the commit or pull request."""

    revision: str
    url: str
    changed: bool
    """False if the repository held the very same files already."""


class Hub(ABC):
    """One hub. Every method raises `HubError`, in one sentence, for what the hub or the network refuses."""

    name: str

    @abstractmethod
    def resolve(self, repo: str, revision: str | None = None) -> str:
        """The revision that a branch, tag or None (the newest) stands for, to read from."""

    @abstractmethod
    def list_files(self, repo: str, revision: str | None) -> dict[str, str | None]:
        """Path -> sha256 where the hub tells it, of every file."""

    @abstractmethod
    def fetch(self, repo: str, revision: str | None, paths: list[str], folder: Path) -> None:
        """Download these files into `folder`, under the same paths."""

    @abstractmethod
    def publish(
        self, repo: str, files: Mapping[str, Path | bytes], message: str, parent: str | None, tag: str, create_pr: bool
    ) -> Published:
        """Put files into a repository, made if it is not there, in one step that readers see whole or not at all.

        `parent` is the head that the files were made for: raises `StaleParent` if the repository has moved on since.
        """

    def read(self, repo: str, revision: str | None, path: str) -> bytes | None:
        """One small file, or None if the revision has none of that name."""
        with tempfile.TemporaryDirectory() as scratch:
            try:
                self.fetch(repo, revision, [path], Path(scratch))
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
