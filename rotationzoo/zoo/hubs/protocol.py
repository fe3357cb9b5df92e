"""The interface of a hub, and the table of hubs.

All retries happen here: Hugging Face's client does not retry a 503 on the body of a file or on a
commit, and ModelScope's waits silently for minutes.
"""

import importlib
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, cast

from rotationzoo.errors import HubError
from rotationzoo.network.limits import ANSWER_BYTES

T = TypeVar("T")
_ATTEMPTS = 4
_PAUSE_SECONDS = 1.0  # before the second attempt; doubles each time
SPELLING_HINT = "check the spelling of the repository and the revision"


@dataclass(frozen=True)
class Publication:
    """Files to publish in one step: path in the repository -> local file, or content. `parent`: the
    head that they build on, None without a repository. `tag`: for a hub that pins by tags.
    `create_pr`: whether to open a pull request, on a hub that has them."""

    repo: str
    files: Mapping[str, Path | bytes]
    message: str
    parent: str | None
    tag: str
    create_pr: bool


@dataclass(frozen=True)
class Published:
    """A fixed revision, its page, and whether its files differ from those that were there."""

    revision: str
    url: str
    changed: bool


class Hub(ABC):
    """One hub. It imports its client only when it is used, and limits what it reads. Every method
    raises `HubError` if the hub or the network fails."""

    pins_by_tag = False
    """Whether the published revision is the publication's tag, or else a commit."""

    @abstractmethod
    def resolve(self, repo: str) -> str:
        """The newest revision, to read from."""

    @abstractmethod
    def fetch(self, repo: str, revision: str | None, path: str, size: int, folder: Path) -> None:
        """Download a file of at most `size` bytes into `folder`, under the same path."""

    @abstractmethod
    def publish(self, publication: Publication) -> Published:
        """Publish all files or none, to a repository that is created if necessary. Raises
        `StaleParent` if its head is no longer `publication.parent`."""

    @staticmethod
    def may_pass(error: Exception) -> bool:
        """Whether a retry of the same call may succeed."""
        return False

    def retry(self, call: Callable[..., T], *args: Any, **options: Any) -> T:
        """Call up to `_ATTEMPTS` times, with growing pauses, while failures `may_pass`."""
        for attempt in range(_ATTEMPTS - 1):
            try:
                return call(*args, **options)
            except Exception as error:
                if not self.may_pass(error):
                    raise
                time.sleep(_PAUSE_SECONDS * 2**attempt)
        return call(*args, **options)

    def read(self, repo: str, revision: str | None, path: str) -> bytes | None:
        """The content of a file of at most `ANSWER_BYTES`; None if the revision has none."""
        with tempfile.TemporaryDirectory() as scratch:
            try:
                self.fetch(repo, revision, path, ANSWER_BYTES, Path(scratch))
            except HubError as error:
                if error.missing:
                    return None
                raise
            return (Path(scratch) / path).read_bytes()


class HubEntry(NamedTuple):
    """A hub: its name in sentences and in `list`, and its class in its module of `zoo/hubs`."""

    title: str
    abbreviation: str
    class_name: str


HUBS = {
    "huggingface": HubEntry("Hugging Face", "hf", "HuggingFace"),
    "modelscope": HubEntry("ModelScope", "ms", "ModelScope"),
    "disk": HubEntry("disk", "disk", "Disk"),
}
*HUB_NAMES, DISK = HUBS
DEFAULT_HUB = HUB_NAMES[0]

# Typer and pydantic read the choices from a Literal. mypy does not accept a computed one.
if TYPE_CHECKING:
    HubName = str
    PlaceName = str
    HubOrBoth = str
    HubOrAny = str
else:
    HubName, PlaceName = Literal[*HUB_NAMES], Literal[*HUBS]
    HubOrBoth, HubOrAny = Literal[*HUB_NAMES, "both"], Literal[*HUB_NAMES, "any"]


def is_folder(repo: str) -> bool:
    """Whether a repository is a folder on disk, whose path begins with `.`, `/` or `~`."""
    return repo.startswith((".", "/", "~"))


def chosen_hubs(choice: str, repo: str | None = None) -> list[str]:
    """The hubs that a choice names: all of them for `both` and `any`, the disk for a folder."""
    if repo is not None and is_folder(repo):
        return [DISK]
    return [*HUB_NAMES] if choice in ("both", "any") else [choice]


def open_hub(name: str) -> Hub:
    """The client of a hub. Raises `KeyError` if the table has no such name."""
    module = importlib.import_module(f"rotationzoo.zoo.hubs.{name}")
    return cast(Hub, getattr(module, HUBS[name].class_name)())
