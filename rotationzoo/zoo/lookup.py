"""Where the index of a zoo is read, and which of its entries is meant."""

import http.client
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from rotationzoo.errors import HubError, RotationZooError, first_sentence
from rotationzoo.network import limits
from rotationzoo.zoo import index
from rotationzoo.zoo.hubs import SPELLING, TITLES, hub
from rotationzoo.zoo.index import Copy, Entry, Index

ZOO = "rotationzoo/zoo"
BUNDLED = "bundled"
"""The index that came with this package, as `--index` names it."""


@dataclass(frozen=True)
class Found:
    """An index and where it was read: in words, and if it is a repository's own, which one at which
    revision."""

    content: Index
    origin: str
    hub: str | None = None
    repo: str | None = None
    revision: str | None = None


def find_index(place: str | None, repo: str | None, hub_name: str = "huggingface") -> Found:
    """The index at a path, a URL or `bundled`; or else that of a zoo repository on one hub.

    A repository that nobody named, `ZOO`, may not exist: then the copy that came with this package
    is read. Raises `HubError` for a repository that somebody named and that is not there, and for
    whatever else keeps a hub from answering: a repository of the same name on another hub may be
    anybody's.
    """
    if place == BUNDLED:
        return Found(index.read(index.WHEEL_COPY), "the index that came with rotationzoo")
    if place is not None:
        if place.startswith(("http://", "https://")):
            return Found(index.parse(_get(place), place), place)
        return Found(index.read(Path(place).expanduser()), place)
    try:
        return read_index(repo or ZOO, hub_name)
    except HubError as error:
        if repo is not None:
            elsewhere = error.missing and hub_name == "huggingface"
            hint = "; or, if it is on ModelScope, add: --from modelscope" if elsewhere else ""
            raise HubError(str(error), hint=f"{error.hint}{hint}") from error
        if error.missing or error.hidden:
            return Found(
                index.read(index.WHEEL_COPY), f"the index that came with rotationzoo ({error})"
            )
        hint = f"{error.hint}; or read the list that came with rotationzoo: --index {BUNDLED}"
        raise HubError(str(error), hint=hint) from error


def read_index(repo: str, hub_name: str) -> Found:
    """A repository's own index. Raises `HubError`, `missing` where there is no repository, or none
    with an index."""
    client = hub(hub_name)
    revision = client.resolve(repo)
    text = client.read(repo, revision, index.NAME)
    if text is None:
        raise HubError(
            f"{repo} on {TITLES[hub_name]} has no {index.NAME}", hint=SPELLING, missing=True
        )
    where = f"the index of {repo} on {hub_name} at {revision}"
    return Found(index.parse(text, where), where, hub_name, repo, revision)


def choose(
    found: Found, model: str, revision: str | None, recipe: str | None, hubs: list[str]
) -> tuple[Entry, list[Copy], str]:
    """The best entry of a model and its places on these hubs, and in words why this one: that of
    the model's revision, or else the newest. Raises `RotationZooError` if there is none."""
    matching = [
        e
        for e in found.content.entries
        if e.model.lower() == model.lower() and recipe in (None, e.recipe)
    ]
    matching = [e for e in matching if any(copy.hub in hubs for copy in e.copies)]
    if not matching:
        raise RotationZooError(
            f"{found.origin} has no rotation for {model}"
            + (f" with the recipe {recipe}" if recipe else ""),
            hint=f"see what there is with: rotationzoo list; or make one with: rotationzoo calibrate {model}",
        )
    if not any(e.pullable for e in matching):
        entry = matching[0]
        raise RotationZooError(
            f"what is published for {entry.model} is not pulled: {entry.note or entry.format}",
            hint=f"it is at {entry.copies[0].repo}; or make rotations with: rotationzoo calibrate {entry.model}",
        )
    matching = [e for e in matching if e.pullable]
    exact = [e for e in matching if revision and e.model_revision == revision]
    entry = max(exact or matching, key=lambda e: (e.format == "rotationzoo", e.created or ""))
    made_for = (
        f"revision {entry.model_revision}"
        if entry.model_revision
        else "a revision that nobody recorded"
    )
    why = f"{entry.recipe} for {made_for} of {entry.model}"
    if revision and not exact:
        why += f": there is none for {revision}, this is the newest"
    return entry, [copy for name in hubs for copy in entry.copies if copy.hub == name], why


def _get(url: str) -> bytes:
    """What is at an address; no more than an index takes, and no longer than an answer may."""

    def read() -> bytes:
        with urllib.request.urlopen(url, timeout=limits.ANSWER) as answer:
            limits.check_encoding(answer.headers, url)
            return b"".join(
                limits.bounded(iter(lambda: answer.read1(1 << 16), b""), limits.LARGE, url)
            )

    try:
        return limits.within(limits.ANSWER, read, url)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise HubError(
            f"{url} cannot be read: {first_sentence(error)}",
            hint="check the address given with --index",
        ) from error
