"""The zoo that the Space shows: its index, read again every few minutes, and its evaluations."""

import threading
import time
from dataclasses import dataclass, replace
from functools import lru_cache

from planning import check_model
from zoo_table import Row, make_row

from rotationzoo.artifact.measured import Measured
from rotationzoo.artifact.store import EVALUATION
from rotationzoo.errors import HubError, RotationZooError
from rotationzoo.report.memory import Request
from rotationzoo.report.page import Advice, Arms, describe_verdict, label_arms
from rotationzoo.storage import strict_json
from rotationzoo.storage.files import digest
from rotationzoo.zoo.hubs.protocol import open_hub
from rotationzoo.zoo.index import Entry
from rotationzoo.zoo.lookup import BUNDLED_INDEX, LoadedIndex, find_index, read_index

_FRESH = 300  # seconds for which an index is not read again


@dataclass(frozen=True)
class ZooEntries:
    """What a zoo lists at one time."""

    loaded: LoadedIndex
    place: list[str]
    """The options of `pull` that name the index."""

    def rows(self) -> list[Row]:
        """The rows of the table, with a link to the answers of each entry that has any."""
        rows = []
        for entry in self.loaded.content.entries:
            row = make_row(self.loaded, entry, self.place)
            if EVALUATION in entry.files:
                (name, links), *others = row.copies
                links = {**links, "answers and costs": f"/answers/{entry.identity}"}
                row = replace(row, copies=[(name, links), *others])
            rows.append(row)
        return rows

    def of_model(self, model: str) -> list[Entry]:
        """The entries of a model."""
        name = check_model(model).lower()
        return [entry for entry in self.loaded.content.entries if entry.model.lower() == name]

    def entry(self, identity: str) -> Entry:
        """The artifact with this sha256. Raises `RotationZooError` if none is listed."""
        for entry in self.loaded.content.entries:
            if entry.format == "rotationzoo" and entry.identity == identity:
                return entry
        raise RotationZooError("the zoo lists no such rotations", hint="choose some of the table")

    def answers(self, entry: Entry) -> tuple[Advice, Arms]:
        """Answers and costs from an entry's `evaluation.json`, whose hash must be the listed one.

        Raises `RotationZooError` if it has none, and `HubError` if no hub has the listed file.
        """
        listed = entry.files.get(EVALUATION)
        if listed is None:
            raise RotationZooError("these rotations were published without an evaluation")
        copy = entry.copies[0]
        place = (copy.hub, copy.repo, self.loaded.revision_of(copy), copy.path_of(EVALUATION))
        return _draw(_read(place, listed.sha256), entry.identity)


# With the hash, so that what has changed on a hub is read again.
@lru_cache(maxsize=32)
def _read(place: tuple[str, str, str | None, str], sha256: str | None) -> bytes:
    hub, *file = place
    data = open_hub(hub).read(*file)
    if data is None or digest(data) != sha256:
        raise HubError("the evaluation on the hub is not the one that the zoo lists")
    return data


# A figure keeps its drawing, so that each is drawn once.
@lru_cache(maxsize=32)
def _draw(data: bytes, identity: str) -> tuple[Advice, Arms]:
    content = strict_json.parse(data, EVALUATION)
    evaluation = strict_json.validate(Measured, content, EVALUATION)
    arms = label_arms(evaluation, identity)
    return describe_verdict(arms, Request()), arms


class Zoo:
    """The entries of a zoo on Hugging Face, or what came with rotationzoo while it cannot be
    read."""

    def __init__(self, repo: str):
        self.repo = repo
        self._lock = threading.Lock()
        self._read_at = float("-inf")
        self._entries: ZooEntries | None = None

    def entries(self) -> ZooEntries:
        """What the zoo lists; a hub that fails is asked again after some minutes.

        One visitor waits for the hub, and the others have what was read before.
        """
        entries = self._entries
        if entries is not None and time.monotonic() - self._read_at <= _FRESH:
            return entries
        if not self._lock.acquire(blocking=entries is None):
            return entries
        try:
            if self._entries is None or time.monotonic() - self._read_at > _FRESH:
                self._entries = self._load()
                self._read_at = time.monotonic()
            return self._entries
        finally:
            self._lock.release()

    def _load(self) -> ZooEntries:
        try:
            return ZooEntries(read_index(self.repo, "huggingface"), ["--repo", self.repo])
        except RotationZooError:
            if self._entries is not None:
                return self._entries
            return ZooEntries(find_index(BUNDLED_INDEX, None), ["--index", BUNDLED_INDEX])
