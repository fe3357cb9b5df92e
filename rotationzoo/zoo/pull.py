"""Pulling a published rotation into a local folder: every hash is checked, and a failed pull leaves
nothing behind."""

from pathlib import Path

from rotationzoo.artifact.store import Artifact
from rotationzoo.checks.verify import verify
from rotationzoo.errors import HubError, RotationZooError
from rotationzoo.progress import Progress, silent
from rotationzoo.storage.files import disk_errors, sha256
from rotationzoo.storage.folders import install, temporary_sibling
from rotationzoo.writer import remember
from rotationzoo.zoo.download import (
    WAY_OUT,
    Pulled,
    cache_folder,
    check_target,
    download_files,
    hash_files,
)
from rotationzoo.zoo.hubs.registry import open_hub
from rotationzoo.zoo.index import Copy, Entry
from rotationzoo.zoo.lookup import LoadedIndex
from rotationzoo.zoo.oscar_zoo import pull_oscar
from rotationzoo.zoo.ownership import check_entry
from rotationzoo.zoo.signing.artifact import check_files
from rotationzoo.zoo.signing.check import Finding, Signed, expected_signers
from rotationzoo.zoo.signing.demand import Demand

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
