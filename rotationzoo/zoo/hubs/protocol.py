"""The interface of a hub: resolve a revision, list and fetch files, and publish files; and the
table of hubs, from which the command line, the index and the tests take their names.

A hub imports its client only when it is used. It limits what it reads and retries failures that may
be temporary. The caller checks the hashes.

The clients' own retries were tested with every kind of fault. Hugging Face's client does not retry
a 503 on the body of a file or on a commit, and ModelScope's waits silently for minutes. Both are
therefore told not to retry, and all retries happen here.
"""

import importlib
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from rotationzoo.errors import HubError

T = TypeVar("T")
_ATTEMPTS = 4
_PAUSE_SECONDS = 1.0  # before the second attempt; doubles each time
SPELLING_HINT = "check the spelling of the repository and the revision"


@dataclass(frozen=True)
class Publication:
    """Files to publish to a repository in one step."""

    repo: str
    files: Mapping[str, Path | bytes]
    """Path in the repository -> local file, or content."""
    message: str
    parent: str | None
    """The head on which the files build; None if there was no repository."""
    tag: str
    """The tag that marks the published files, on a hub that pins by tags."""
    create_pr: bool
    """Whether to open a pull request, on a hub that has them."""


@dataclass(frozen=True)
class Published:
    """Where published files are: a fixed revision, and the page of the commit or pull request."""

    revision: str
    url: str
    changed: bool
    """False if the repository already held the same files."""


class Hub(ABC):
    """One hub. Every method raises a `HubError` of one sentence if the hub or the network fails."""

    pins_by_tag = False
    """Whether the published revision is the publication's tag, which is known in advance. Otherwise
    it is a commit, whose name is known only afterwards."""

    @abstractmethod
    def resolve(self, repo: str) -> str:
        """The newest revision, to read from."""

    @abstractmethod
    def list_files(self, repo: str, revision: str | None) -> dict[str, int]:
        """Path -> size in bytes of every file at a revision, as the hub claims."""

    @abstractmethod
    def fetch(
        self, repo: str, revision: str | None, sizes: Mapping[str, int], folder: Path
    ) -> None:
        """Download these files into `folder`, under the same paths. `sizes`: path -> the most bytes
        to accept."""

    @abstractmethod
    def publish(self, publication: Publication) -> Published:
        """Publish files to a repository, which is made if there is none; readers see all or none.
        Raises `StaleParent` if the repository has changed since `publication.parent`."""

    @staticmethod
    def may_pass(error: Exception) -> bool:
        """Whether a retry of the same call may succeed; never, unless a hub knows better."""
        return False

    def retry(self, call: Callable[..., T], *args: Any, **options: Any) -> T:
        """Call until it succeeds, up to `_ATTEMPTS` times with growing pauses, as long as a failure
        `may_pass`. A `HubError` never does."""
        for attempt in range(_ATTEMPTS - 1):
            try:
                return call(*args, **options)
            except Exception as error:
                if isinstance(error, HubError) or not self.may_pass(error):
                    raise
                time.sleep(_PAUSE_SECONDS * 2**attempt)
        return call(*args, **options)

    def read(self, repo: str, revision: str | None, path: str) -> bytes | None:
        """The content of a file of at most `ANSWER_BYTES`; None if the revision has none."""
        # Here, because `--help` reads the table below, and must not wait for safetensors.
        from rotationzoo.network.limits import ANSWER_BYTES

        with tempfile.TemporaryDirectory() as scratch:
            try:
                self.fetch(repo, revision, {path: ANSWER_BYTES}, Path(scratch))
            except HubError as error:
                if error.missing:
                    return None
                raise
            return (Path(scratch) / path).read_bytes()


@dataclass(frozen=True)
class HubEntry:
    """Everything known about a hub without importing its client."""

    title: str
    """Its name in sentences."""
    abbreviation: str
    """Its name in the narrow column of `list`."""
    class_name: str
    """Its class in the module of `zoo/hubs` that has the hub's name, imported only on use."""


HUBS = {
    "huggingface": HubEntry(title="Hugging Face", abbreviation="hf", class_name="HuggingFace"),
    "modelscope": HubEntry(title="ModelScope", abbreviation="ms", class_name="ModelScope"),
    "disk": HubEntry(title="disk", abbreviation="disk", class_name="Disk"),
}
*HUB_NAMES, DISK = HUBS
DEFAULT_HUB = HUB_NAMES[0]  # where to look and publish if the user names no hub

# Typer derives an option's choices from a Literal, and pydantic a field's check. mypy does not
# accept a computed Literal, so it sees `str`.
if TYPE_CHECKING:
    HubName = str
    PlaceName = str
    HubOrBoth = str
    HubOrAny = str
else:
    HubName, PlaceName = Literal[*HUB_NAMES], Literal[*HUBS]
    HubOrBoth, HubOrAny = Literal[*HUB_NAMES, "both"], Literal[*HUB_NAMES, "any"]


def is_folder(repo: str) -> bool:
    """Whether a repository is a folder: its path begins as no name of a repository does."""
    return repo.startswith((".", "/", "~"))


def chosen_hubs(choice: str, repo: str | None = None) -> list[str]:
    """The hubs that a choice stands for; `both` and `any` mean all of them. A folder is on disk."""
    if repo is not None and is_folder(repo):
        return [DISK]
    return [*HUB_NAMES] if choice in ("both", "any") else [choice]


def open_hub(name: str) -> Hub:
    """The client of a hub. Raises `KeyError` if the table has no such name."""
    module = importlib.import_module(f"rotationzoo.zoo.hubs.{name}")
    return cast(Hub, getattr(module, HUBS[name].class_name)())
