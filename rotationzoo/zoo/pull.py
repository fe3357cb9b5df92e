"""Pulling a published rotation into a local folder: every hash is checked, and a failed pull leaves
nothing behind.

OSCAR's authors publish pairs of `.pt` files without hashes. The first download records the hashes
in `zoo.lock.json` next to the files. Later downloads must agree with them.
"""

from pathlib import Path

from pydantic import ValidationError

from rotationzoo.artifact.manifest import PlainName
from rotationzoo.artifact.store import Artifact
from rotationzoo.checks.verify import verify
from rotationzoo.engines.formats.oscar_pt_reader import read_pt
from rotationzoo.engines.rotation_file import check_matrices
from rotationzoo.errors import HubError, RotationZooError
from rotationzoo.progress import Progress, silent
from rotationzoo.storage import strict_json
from rotationzoo.storage.files import disk_errors, sha256, write_new
from rotationzoo.storage.folders import install, recover, temporary_sibling
from rotationzoo.writer import remember
from rotationzoo.zoo.download import (
    LOCK,
    WAY_OUT,
    Pulled,
    cache_folder,
    check_target,
    download_files,
    hash_files,
)
from rotationzoo.zoo.hubs.protocol import SPELLING_HINT
from rotationzoo.zoo.hubs.registry import open_hub
from rotationzoo.zoo.index import Copy, Entry, File, Place
from rotationzoo.zoo.lookup import LoadedIndex
from rotationzoo.zoo.ownership import check_entry
from rotationzoo.zoo.signing.verify import Demand, Finding, Signed, check_files, expected_signers

MAX_BYTES = 4 << 30
"""The most bytes to download for one entry. The index gives no sizes for these files, so the only
sizes are those that the hub itself claims."""
_UNHASHED_NOTE = (
    "no hash was published for these files: revision and hashes are recorded next to them"
)


class Lock(strict_json.Strict):
    """The content of `zoo.lock.json`: the revision and the hashes of the first download."""

    revision: Place
    files: dict[PlainName, File]


def pull_oscar(entry: Entry, copy: Copy, target: Path, progress: Progress) -> Pulled:
    """Download the files of an entry without hashes, and check them against an earlier record.

    If the hub does not answer, this returns the recorded files, provided that they are still there
    and unchanged. Raises `RotationZooError` if a file differs from the record, or does not hold
    rotations.
    """
    lock = _read_lock(target)
    recorded = hash_files(target, lock.files) if lock else None
    try:
        revision = copy.revision or open_hub(copy.hub).resolve(copy.repo)
    except HubError as error:
        if lock is None or recorded is None:
            raise
        note = f"{error}; these are the files recorded earlier"
        return Pulled(target, entry, copy, lock.revision, recorded, [note])
    if lock is not None and recorded is not None and lock.revision == revision:
        note = "it was here already, as recorded"
        return Pulled(target, entry, copy, revision, recorded, [note])
    check_target(target, entry)
    with disk_errors(target, WAY_OUT), temporary_sibling(target) as work:
        sizes = _find_sizes(entry, copy, revision)
        downloaded = download_files(copy, revision, sizes, work, progress)
        files, hashes = {}, {}
        for name in entry.files:
            path = downloaded / name
            hashes[name] = sha256(path)
            files[name] = File(size=path.stat().st_size, sha256=hashes[name])
            if not _is_as_recorded(name, hashes[name], entry, lock):
                raise RotationZooError(
                    f"{name} of {copy.repo} at {revision} is not the file that was recorded: "
                    "its sha256 differs",
                    hint="its owners may have replaced it; to take the new one, remove "
                    f"{target} and run the command again",
                )
            check_matrices(read_pt(path))
        _write_lock(downloaded, copy, revision, files)
        install(downloaded, target)
    return Pulled(target, entry, copy, revision, hashes, [_UNHASHED_NOTE])


def _find_sizes(entry: Entry, copy: Copy, revision: str) -> dict[str, int]:
    """Name -> size in bytes, from the index or else from the hub's listing.

    Raises `HubError` if the hub does not list a file, or if the total exceeds `MAX_BYTES`.
    """
    listed = open_hub(copy.hub).list_files(copy.repo, revision)
    sizes = {}
    for name, file in entry.files.items():
        path = copy.path_of(name)
        if path not in listed:
            raise HubError(
                f"{copy.repo} at {revision} has no {path}", hint=SPELLING_HINT, missing=True
            )
        sizes[name] = listed[path].size if file.size is None else file.size
    total = sum(sizes.values())
    # The sizes come from the hub, which may claim anything, even a negative number.
    if total > MAX_BYTES or min(sizes.values()) < 0:
        raise HubError(
            f"{copy.repo} lists {total:,} bytes for {copy.path}, more than rotations of a model "
            "take",
            hint="look at the repository, and fetch the files yourself if they are what you want",
        )
    return sizes


def _is_as_recorded(name: str, sha256: str, entry: Entry, lock: Lock | None) -> bool:
    """Whether a file's hash agrees with the index and the lock, where these have a hash."""
    recorded = [entry.files[name]]
    if lock is not None and name in lock.files:
        recorded.append(lock.files[name])
    return all(file.sha256 in (None, sha256) for file in recorded)


def _read_lock(target: Path) -> Lock | None:
    """The lock of a folder. None if it has none; a damaged lock counts as none."""
    recover(target)
    try:
        return Lock.model_validate(strict_json.read(target / LOCK))
    except (RotationZooError, ValidationError):
        return None


def _write_lock(folder: Path, copy: Copy, revision: str, files: dict[str, File]) -> None:
    content = {
        "repo": copy.repo,
        "revision": revision,
        "files": {name: file.model_dump() for name, file in files.items()},
    }
    write_new(folder / LOCK, strict_json.text(content))


_NO_DEMAND = Demand()


def pull_first(
    loaded: LoadedIndex,
    entry: Entry,
    copies: list[Copy],
    local_dir: Path | None = None,
    progress: Progress = silent,
    demand: Demand = _NO_DEMAND,
) -> Pulled:
    """Pull the first of an entry's copies that exists.

    Only a missing copy makes this try the next one. Any other error is raised, because a hub that
    fails must not be replaced by another.
    """
    for copy in copies[:-1]:
        try:
            return pull(loaded, entry, copy, local_dir, progress, demand)
        except HubError as error:
            if not error.missing:
                raise
    return pull(loaded, entry, copies[-1], local_dir, progress, demand)


def pull(
    loaded: LoadedIndex,
    entry: Entry,
    copy: Copy,
    local_dir: Path | None = None,
    progress: Progress = silent,
    demand: Demand = _NO_DEMAND,
) -> Pulled:
    """Download one copy of an entry unless it is here already, check it, and move it into place.

    `local_dir` is the target folder, by default one in the cache. Raises `RotationZooError` and
    leaves nothing behind if a hash differs, if the artifact is not sound, if it belongs to another
    model than the entry's, or if its signature is wrong or not the one that `demand` asks for.
    """
    hub = open_hub(copy.hub)
    revision = loaded.revision_of(copy)
    what = f"{copy.path} of {copy.repo}"
    # Before anything is downloaded.
    expected = expected_signers(demand, entry.signer, loaded.hub is None, what)
    if entry.format == "oscar":
        if expected:
            raise RotationZooError(
                f"{what} has no signature, as its makers publish none",
                hint="make rotations of your own with: rotationzoo calibrate " + entry.model,
            )
        # An update replaces the earlier files, so the cache folder does not depend on the revision.
        return pull_oscar(entry, copy, local_dir or cache_folder(copy, None), progress)
    target = local_dir or cache_folder(copy, revision)
    hashes = hash_files(target, entry.files)
    if hashes is not None:
        artifact = Artifact.open(target, hashes)
        if unlisted := artifact.unlisted_files():
            raise RotationZooError(
                f"{target} is not only what was pulled: {unlisted[0]}",
                hint="move it elsewhere and run the same command again",
            )
        check_entry(entry, artifact, what)
        finding = _check_signature(loaded, entry, artifact, what, demand)
        remember(artifact.identity)
        notes = ["it was here already"]
        return Pulled(target, entry, copy, revision, hashes, notes, artifact, finding)
    check_target(target, entry)
    revision = revision or hub.resolve(copy.repo)
    with disk_errors(target, WAY_OUT), temporary_sibling(target) as work:
        sizes = {name: file.size or 0 for name, file in entry.files.items()}
        downloaded = download_files(copy, revision, sizes, work, progress)
        hashes = {name: sha256(downloaded / name) for name in entry.files}
        for name, file in entry.files.items():
            if hashes[name] != file.sha256:
                raise RotationZooError(
                    f"{name} of {copy.repo} is not the file that the index lists: its sha256 "
                    "differs",
                    hint="run the same command again; if it stays so, tell the owners of the "
                    "repository",
                )
        progress("checking", 0, 0)
        artifact = Artifact.open(downloaded, hashes)
        checked = verify(artifact)
        if not checked.ok:
            raise RotationZooError(f"{what} is not sound: {checked.problems[0]}")
        check_entry(entry, artifact, what)
        finding = _check_signature(loaded, entry, artifact, what, demand)
        install(downloaded, target)
    remember(artifact.identity)
    moved = artifact.moved_to(target)
    return Pulled(target, entry, copy, revision, hashes, artifact=moved, signature=finding)


def _check_signature(
    loaded: LoadedIndex, entry: Entry, artifact: Artifact, what: str, demand: Demand
) -> Finding:
    """Check the signature of an artifact whose files were just hashed."""
    hashes = {name: artifact.hashes[name] for name in entry.files}
    signed = Signed(what, hashes, None, entry.signer, loaded.hub is None)
    return check_files(signed, artifact.folder, demand)
