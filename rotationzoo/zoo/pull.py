"""A published rotation -> a folder on this machine, every hash checked, whole or not there."""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from pydantic import ValidationError

from rotationzoo.artifact.store import MANIFEST, PARTS, Artifact
from rotationzoo.checks.verify import verify
from rotationzoo.engines import recognise
from rotationzoo.engines.formats import oscar_pt
from rotationzoo.errors import HubError, RotationZooError
from rotationzoo.progress import Progress, silent
from rotationzoo.storage import files, strict_json
from rotationzoo.storage.files import child, disk_errors, regular_file, sha256, write_new
from rotationzoo.storage.folders import check_name, install, recover, temporary_sibling
from rotationzoo.zoo import index
from rotationzoo.zoo.hubs import SPELLING, TITLES, hub
from rotationzoo.zoo.index import Copy, Entry, File
from rotationzoo.zoo.lookup import Found
from rotationzoo.zoo.ownership import check_entry

LOCK = "zoo.lock.json"
FOREIGN_BYTES = 4 << 30
"""The most that is downloaded of files whose sizes nobody has published but the hub that serves
them."""


@dataclass(frozen=True)
class Pulled:
    path: Path
    entry: Entry
    copy: Copy
    revision: str | None
    files: dict[str, str]
    """Name -> sha256 of what is on the disk."""
    notes: list[str] = field(default_factory=list)
    artifact: Artifact | None = None
    """Opened, with what was read of it when it was checked; None of files of OSCAR's makers."""


def pull_first(
    found: Found,
    entry: Entry,
    copies: list[Copy],
    local_dir: Path | None = None,
    progress: Progress = silent,
) -> Pulled:
    """Pull from the first of an entry's places that exists. Whatever else goes wrong with a place
    is raised."""
    for copy in copies[:-1]:
        try:
            return pull(found, entry, copy, local_dir, progress)
        except HubError as error:
            if not error.missing:
                raise
    return pull(found, entry, copies[-1], local_dir, progress)


def pull(
    found: Found,
    entry: Entry,
    copy: Copy,
    local_dir: Path | None = None,
    progress: Progress = silent,
) -> Pulled:
    """Download what is not here yet, check it, and put it in place. Raises `RotationZooError`, and
    leaves nothing behind, if a hash differs or the artifact is not sound, or of another model than
    the entry's."""
    client = hub(copy.hub)
    own = found.hub == copy.hub and found.repo == copy.repo
    revision = copy.revision or (found.revision if own else None)
    target = local_dir or cache_folder(copy, revision if entry.format == "rotationzoo" else None)
    if entry.format == "oscar":
        return _pull_foreign(entry, copy, target, progress)
    if (there := hashes(target, entry.files)) is not None:
        artifact = Artifact.open(target, there)
        check_entry(entry, artifact, f"{copy.path} of {copy.repo}")
        return Pulled(target, entry, copy, revision, there, ["it was here already"], artifact)
    _check_target(target, entry)
    revision = revision or client.resolve(copy.repo)
    with disk_errors(target), temporary_sibling(target) as work:
        progress(f"downloading from {copy.repo} on {TITLES[copy.hub]}", 0, 0)
        sizes = {name: file.size or 0 for name, file in entry.files.items()}
        got = _download(copy, revision, sizes, work)
        hashed = {name: sha256(got / name) for name in entry.files}
        for name, file in entry.files.items():
            if hashed[name] != file.sha256:
                raise RotationZooError(
                    f"{name} of {copy.repo} is not the file that the index lists: its sha256 differs",
                    hint="run the same command again; if it stays so, tell the owners of the repository",
                )
        progress("checking", 0, 0)
        artifact = Artifact.open(got, hashed)
        checked = verify(artifact)
        if not checked.ok:
            raise RotationZooError(
                f"{copy.path} of {copy.repo} is not sound: {checked.problems[0]}"
            )
        check_entry(entry, artifact, f"{copy.path} of {copy.repo}")
        install(got, target)
    artifact = artifact.moved_to(target)
    return Pulled(target, entry, copy, revision, hashed, artifact=artifact)


def are_there(found: Found, entries: list[Entry]) -> list[bool | None]:
    """Whether some hub lists all files of each entry; None where none of those that answer does,
    and one does not answer."""

    @cache
    def listed(hub_name: str, repo: str, revision: str | None) -> set[str] | None:
        try:
            return set(hub(hub_name).list_files(repo, revision))
        except HubError as error:
            return set() if error.missing else None

    def is_there(entry: Entry) -> bool | None:
        unknown = False
        for copy in entry.copies:
            own = found.revision if (found.hub, found.repo) == (copy.hub, copy.repo) else None
            names = listed(copy.hub, copy.repo, copy.revision or own)
            if names and all(_inside(copy, name) in names for name in entry.files):
                folder = f"{copy.path}/" if copy.path else ""
                if any(name.startswith(folder) for name in names):
                    return True
            unknown = unknown or names is None
        return None if unknown else False

    return [is_there(entry) for entry in entries]


def _inside(copy: Copy, name: str) -> str:
    """The path of a file in the copy's repository, whose root may be the folder."""
    return f"{copy.path}/{name}" if copy.path else name


def cache_folder(copy: Copy, revision: str | None) -> Path:
    """Where pulled files live unless told otherwise: huggingface_hub's folder for what other
    libraries keep."""
    from huggingface_hub import cached_assets_path

    place = cached_assets_path("rotationzoo", namespace=copy.hub, subfolder=copy.repo)
    return child(place, f"{revision or 'unpinned'}/{copy.path}")


def hashes(folder: Path, listed: Mapping[str, File]) -> dict[str, str] | None:
    """sha256 of each file, or None if one is missing, no regular file of the folder, or not as
    listed."""
    found: dict[str, str] = {}
    recover(folder)
    for name, file in listed.items():
        try:
            path = regular_file(folder, name)
        except RotationZooError:
            return None
        if files.size_of(path) != file.size or found.setdefault(name, sha256(path)) != file.sha256:
            return None
    return found


def _download(copy: Copy, revision: str | None, sizes: Mapping[str, int], work: Path) -> Path:
    """The files of a copy in `work`; returns the folder that holds them, and nothing but them.

    Raises `RotationZooError` before anything is fetched where the disk has no room for all of them.
    """
    raw, needed, free = work / "download", sum(sizes.values()), shutil.disk_usage(work).free
    if needed > free:
        raise RotationZooError(
            f"{copy.path} of {copy.repo} is {needed:,} bytes, and {free:,} are free on the disk",
            hint="make room, or choose another place with --local-dir",
        )
    hub(copy.hub).fetch(
        copy.repo, revision, {_inside(copy, name): size for name, size in sizes.items()}, raw
    )
    clean = work / "files"
    clean.mkdir()
    for name in sizes:  # without what the clients put beside them
        regular_file(raw, _inside(copy, name)).rename(child(clean, name))
    return clean


def _pull_foreign(entry: Entry, copy: Copy, target: Path, progress: Progress) -> Pulled:
    """Files that were published without hashes: what is downloaded first is remembered, and later
    downloads must agree."""
    lock = _read_lock(target)
    notes = ["no hash was published for these files: revision and hashes are recorded beside them"]
    try:
        revision = copy.revision or hub(copy.hub).resolve(copy.repo)
    except HubError as error:
        if lock is None or (held := hashes(target, lock.files)) is None:
            raise
        return Pulled(
            target,
            entry,
            copy,
            lock.revision,
            held,
            [f"{error}; these are the files recorded earlier"],
        )
    if lock and lock.revision == revision and (artifact := hashes(target, lock.files)) is not None:
        return Pulled(target, entry, copy, revision, artifact, ["it was here already, as recorded"])
    _check_target(target, entry)
    with disk_errors(target), temporary_sibling(target) as work:
        progress(f"downloading from {copy.repo} on {TITLES[copy.hub]}", 0, 0)
        got = _download(copy, revision, _listed_sizes(entry, copy, revision), work)
        now = {
            name: File(size=(got / name).stat().st_size, sha256=sha256(got / name))
            for name in entry.files
        }
        for name, file in now.items():
            known = [
                f.sha256
                for f in (entry.files[name], lock.files.get(name) if lock else None)
                if f and f.sha256
            ]
            if any(file.sha256 != earlier for earlier in known):
                raise RotationZooError(
                    f"{name} of {copy.repo} at {revision} is not the file that was recorded: its sha256 differs",
                    hint=f"its owners may have replaced it; to take the new one, remove {target} and run the command again",
                )
            _check_foreign(got / name)
        content = {
            "repo": copy.repo,
            "revision": revision,
            "files": {n: f.model_dump() for n, f in now.items()},
        }
        write_new(got / LOCK, strict_json.text(content))
        install(got, target)
    return Pulled(target, entry, copy, revision, {n: f.sha256 or "" for n, f in now.items()}, notes)


def _listed_sizes(entry: Entry, copy: Copy, revision: str | None) -> dict[str, int]:
    """Name -> size, as the index says or else as the hub lists it."""
    listed = hub(copy.hub).list_files(copy.repo, revision)
    sizes = {}
    for name, file in entry.files.items():
        known = listed.get(_inside(copy, name))
        if known is None:
            raise HubError(
                f"{copy.repo} at {revision} has no {_inside(copy, name)}",
                hint=SPELLING,
                missing=True,
            )
        sizes[name] = known.size if file.size is None else file.size
    if sum(sizes.values()) > FOREIGN_BYTES or min(sizes.values()) < 0:
        raise HubError(
            f"{copy.repo} lists {sum(sizes.values()):,} bytes for {copy.path}, more than rotations of a model take",
            hint="look at the repository, and fetch the files yourself if they are what you want",
        )
    return sizes


def _check_foreign(path: Path) -> None:
    """Raise `RotationZooError` unless a `.pt` file of OSCAR's makers holds an orthogonal matrix for
    each layer."""
    recognise.check_matrices(oscar_pt.read(path))


class _Lock(strict_json.Strict):
    """`zoo.lock.json`: what was downloaded first."""

    revision: index.Place
    files: dict[index.Name, File]


def _read_lock(target: Path) -> _Lock | None:
    recover(target)
    try:
        return _Lock.model_validate(strict_json.read(target / LOCK))
    except (RotationZooError, ValidationError):
        return None


def _check_target(target: Path, entry: Entry) -> None:
    """Nothing of somebody else's is replaced."""
    check_name(target)
    names = {path.name for path in target.iterdir()} if target.is_dir() else set()
    ours = names & {MANIFEST, LOCK} and names <= {*PARTS, LOCK, *entry.files}
    if os.path.lexists(target) and not (target.is_dir() and (ours or not names)):
        raise RotationZooError(
            f"{target} exists and holds other files", hint="choose another place with --local-dir"
        )
