"""Publishing an artifact to a zoo repository, together with its index, in one commit per hub."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rotationzoo.errors import HubError, PartlyDone, RotationZooError, StaleParent
from rotationzoo.progress import Progress, silent
from rotationzoo.storage.files import replace
from rotationzoo.storage.locks import locked
from rotationzoo.zoo import index, signed_index
from rotationzoo.zoo.hubs.protocol import Hub, Publication, Published
from rotationzoo.zoo.hubs.registry import HUBS, open_hub
from rotationzoo.zoo.index import Copy, Entry, Index, render_root_files
from rotationzoo.zoo.ownership import check_unclaimed
from rotationzoo.zoo.signed_index import IndexSigner, check_unsigned_push, read_own_index
from rotationzoo.zoo.upload import Upload

_ATTEMPTS = 4  # another attempt follows another commit in between


@dataclass(frozen=True)
class Destination:
    """The repository to publish to."""

    repo: str
    hubs: list[str]
    """The names of the hubs, in this order."""
    create_pr: bool = False
    """Whether a person decides there, as a pull request."""


def push(
    upload: Upload,
    to: Destination,
    name: str = "ROTATIONS",
    progress: Progress = silent,
    signer: IndexSigner | None = None,
) -> dict[str, Published]:
    """Publish to each hub in the given order, and return hub -> where the artifact is.

    Files that a hub already holds make no new commit. `name` is the name of the artifact in the
    hint; `signer` signs the index. Raises `HubError` if the first hub refuses, `RotationZooError`
    if its index cannot be extended, and `PartlyDone` if that happens with a later one.
    """
    published: dict[str, Published] = {}
    megabytes = sum(file["size"] for file in upload.listing()) / 1e6
    for hub_name in to.hubs:
        progress(f"sending {megabytes:,.0f} MB to {to.repo} on {HUBS[hub_name].title}", 0, 0)
        try:
            published[hub_name] = _push_to_hub(upload, to, hub_name, signer)
        except RotationZooError as error:  # a hub that refuses, or an index signed by others
            if not published:
                raise
            raise PartlyDone(
                f"{', '.join(published)} took it and {hub_name} did not: {error}",
                hint=f"finish with: rotationzoo push {name} {to.repo} --to {hub_name}",
            ) from error
    return published


def check_indexes(upload: Upload, to: Destination, signer: IndexSigner) -> None:
    """Raise `RotationZooError` if the index of a destination may not be extended by this signer.

    To be called before the artifact is signed: a public log keeps a keyless signature for good,
    even if nothing is published with it.
    """
    for hub_name in to.hubs:
        head = _find_head(open_hub(hub_name), to.repo)
        before = read_own_index(hub_name, to.repo, head)
        check_unclaimed(before.content, upload.entry, to.repo)
        signer.check(before)


def extend_index_file(path: Path, entry: Entry) -> None:
    """Add an entry to an index file. Creates the file if necessary, and replaces it whole."""
    path = path.resolve()
    # Under a lock, so that simultaneous commands cannot lose each other's entries.
    with locked(path.with_name(f".{path.name}.lock"), f"writing {path}"):
        before = index.read(path) if path.exists() else Index()
        replace(path, before.extended(entry).text().encode())


def pinned_entry(upload: Upload, repo: str, published: Mapping[str, Published]) -> Entry:
    """The entry of a published artifact with fixed revisions, for another index to list."""
    copies = []
    for hub_name, place in published.items():
        copies.append(Copy(hub=hub_name, repo=repo, path=upload.path, revision=place.revision))
    return upload.entry.model_copy(update={"copies": copies})


def _push_to_hub(
    upload: Upload, to: Destination, hub_name: str, signer: IndexSigner | None
) -> Published:
    hub, repo = open_hub(hub_name), to.repo
    # The index is part of the commit, so it cannot contain the commit's own hash. It leaves the
    # revision out, and readers use the commit at which they read the index.
    revision = upload.tag if hub.pins_by_tag else None
    copy = Copy(hub=hub_name, repo=repo, path=upload.path, revision=revision)
    entry = upload.entry.model_copy(update={"copies": [copy]})
    for _ in range(_ATTEMPTS):
        parent = _find_head(hub, repo)
        before = read_own_index(hub_name, repo, parent)
        check_unclaimed(before.content, entry, repo)
        files = {f"{upload.path}/{name}": content for name, content in upload.files.items()}
        content = before.content.extended(entry)
        if signer is None:
            check_unsigned_push(before)
        else:
            content, files[signed_index.NAME] = signer.sign(before, content)
        files |= render_root_files(repo, content)
        publication = Publication(repo, files, upload.message, parent, upload.tag, to.create_pr)
        try:
            return hub.publish(publication)
        except StaleParent:
            continue  # there was a commit in between, so extend its index
    raise HubError(
        f"{repo} changes faster than it can be extended", hint="run the same command again later"
    )


def _find_head(hub: Hub, repo: str) -> str | None:
    """The newest revision of a repository. None if it does not exist: publishing creates it."""
    try:
        return hub.resolve(repo)
    except HubError as error:
        if not error.missing:
            raise
        return None
