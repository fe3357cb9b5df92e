"""What a hub can do: say where the head is and what it holds, fetch files, and publish files.

A hub imports its client when it is used. It limits what it reads, and repeats what may pass; hashes
are checked by the caller.
"""

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rotationzoo.errors import HubError
from rotationzoo.network.limits import ANSWER_BYTES

SPELLING_HINT = "check the spelling of the repository and the revision"


@dataclass(frozen=True)
class Publication:
    """Files to put into a repository in one step."""

    repo: str
    files: Mapping[str, Path | bytes]
    """Path in the repository -> file on this machine, or content."""
    message: str
    parent: str | None
    """The head that the files were made for; None if there was no repository."""
    tag: str
    """The name of what is published, on a hub that pins by tags."""
    create_pr: bool
    """Whether to open a pull request, on a hub that has them."""


@dataclass(frozen=True)
class Published:
    """Where published files are: a revision that does not move, and the page of the commit or pull
    request."""

    revision: str
    url: str
    changed: bool
    """False if the repository held the very same files already."""


@dataclass(frozen=True)
class ListedFile:
    """What a hub says of a file; `sha256` where it says so much."""

    size: int
    sha256: str | None


class Hub(ABC):
    """One hub. Every method raises `HubError`, in one sentence, for what the hub or the network
    refuses."""

    pins_by_tag = False
    """Whether the revision of what is published is the publication's tag, and so is known before
    it is published. Otherwise it is a commit, which the hub names afterwards."""

    @abstractmethod
    def resolve(self, repo: str, revision: str | None = None) -> str:
        """The revision that a branch, tag or None (the newest) stands for, to read from."""

    @abstractmethod
    def list_files(self, repo: str, revision: str | None) -> dict[str, ListedFile]:
        """Path -> size and hash of every file."""

    @abstractmethod
    def fetch(
        self, repo: str, revision: str | None, sizes: Mapping[str, int], folder: Path
    ) -> None:
        """Download these files into `folder`, under the same paths.

        `sizes`: path -> the size in bytes at which a larger file is given up.
        """

    @abstractmethod
    def publish(self, publication: Publication) -> Published:
        """Put files into a repository, which is created if it does not exist. Readers see all of
        the files or none.

        Raises `StaleParent` if the repository has moved on since `publication.parent`.
        """

    def read(self, repo: str, revision: str | None, path: str) -> bytes | None:
        """One small file, or None if the revision has no file of that name. Raises `HubError` for a
        large one."""
        with tempfile.TemporaryDirectory() as scratch:
            try:
                self.fetch(repo, revision, {path: ANSWER_BYTES}, Path(scratch))
            except HubError as error:
                if error.missing:
                    return None
                raise
            return (Path(scratch) / path).read_bytes()
