"""Pulling published rotations into a local folder: every hash is checked, and a failed pull leaves
nothing behind. OSCAR's authors publish pairs of `.pt` files without hashes."""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from rotationzoo.artifact.store import MANIFEST, PARTS, SIGNATURE, Artifact
from rotationzoo.checks.verify import unlisted_files, verify
from rotationzoo.engines.base import check_matrices
from rotationzoo.engines.formats.oscar_pt import read_pt
from rotationzoo.errors import HubError, RotationZooError
from rotationzoo.progress import Progress, silent, tell_growth
from rotationzoo.settings import Signatures
from rotationzoo.storage import files as storage
from rotationzoo.storage import folders
from rotationzoo.storage.files import disk_errors
from rotationzoo.writer import remember
from rotationzoo.zoo import signing as signatures
from rotationzoo.zoo.hubs.protocol import HUBS, SPELLING_HINT, chosen_hubs, open_hub
from rotationzoo.zoo.index import Copy, Entry, File
from rotationzoo.zoo.lookup import LoadedIndex, choose_entry, find_index
from rotationzoo.zoo.ownership import check_entry
from rotationzoo.zoo.signed_index import check_index

_WAY_OUT = "choose another place with --local-dir"
_NO_DEMAND = signatures.Demand()
MAX_BYTES = 4 << 30
"""The most bytes to download for an entry whose sizes the hub alone claims."""


@dataclass(frozen=True)
class Pulled:
    """A published rotation on this machine."""

    path: Path
    entry: Entry
    copy: Copy
    revision: str | None
    files: dict[str, str]
    """Name -> sha256 of the file on disk."""
    notes: list[str] = field(default_factory=list)
    artifact: Artifact | None = None
    """The opened artifact. None for OSCAR's own files."""
    signature: signatures.Finding | None = None
    """None for OSCAR's own files."""


def pull(
    model: str,
    *,
    recipe: str | None = None,
    revision: str | None = None,
    repo: str | None = None,
    hub: str = "any",
    folder: str | Path | None = None,
    signers: str | Sequence[str] | None = None,
    issuer: str | None = None,
    require_signature: bool = False,
    trust_config: str | Path | None = None,
) -> Artifact:
    """Fetch published rotations, check every hash, and log what is known of the signature.

    * `model`: such as `Qwen/Qwen3-8B`;
    * `recipe`: only rotations of this recipe; those for scaled RoPE are the last choice without it;
    * `revision`: the model revision that the rotations must be made for; by default the newest;
    * `repo`: the repository of a zoo, as `owner/name`, or a folder; by default ours;
    * `hub`: the hub to fetch from, such as `huggingface`; by default any of them;
    * `folder`: where to put the files; by default the cache of huggingface_hub;
    * `signers`: who must have signed them: identities, or files of public keys (`.pem`);
    * `issuer`: who vouches for the identities; not needed for workflows of GitHub;
    * `require_signature`: refuse what is not signed, the index of the repository included;
    * `trust_config`: a file with the keys of another Sigstore than the public one.

    Raises `RotationZooError` where no rotations match, for files that differ from what the index
    lists, and for a signature that is wrong or not as asked.
    """
    asked = Signatures(
        signers=signers,
        issuer=issuer,
        require_signature=require_signature,
        trust_config=None if trust_config is None else Path(trust_config),
    )
    demand = signatures.make_demand(asked)
    hubs = chosen_hubs(hub, repo)
    index = find_index(None, repo, hubs[0])
    check_index(index, demand)
    entry, copies, _ = choose_entry(index, model, revision, recipe, hubs)
    target = None if folder is None else Path(folder)
    pulled = pull_first(index, entry, copies, target, demand=demand)
    if pulled.signature is not None:
        level = logging.INFO if pulled.signature.state == "signed" else logging.WARNING
        logging.getLogger("rotationzoo").log(level, "%s", pulled.signature.note)
    if pulled.artifact is None:
        raise RotationZooError(
            f"rotations of {entry.model} in {pulled.copy.repo} are not an artifact: {pulled.path}",
            hint=f"make one of them: rotationzoo import {pulled.path} --model {entry.model}",
        )
    return pulled.artifact


def _pull_oscar(entry: Entry, copy: Copy, local_dir: Path | None, progress: Progress) -> Pulled:
    """Download the files of an entry without hashes, every time. Raises `RotationZooError` if they
    do not hold rotations."""
    revision = copy.revision or open_hub(copy.hub).resolve(copy.repo)
    target = local_dir or _cache_folder(copy, revision)
    if local_dir is not None:
        _check_target(target, entry)
    sizes = _find_sizes(entry, copy, revision)
    with _downloaded(copy, revision, sizes, target, progress) as (folder, hashes):
        _check_hashes(entry, copy, hashes)
        for name in entry.files:
            check_matrices(read_pt(folder / name))
    note = "no hash was published for these files: their commit alone says which they are"
    return Pulled(target, entry, copy, revision, hashes, [note])


def _check_hashes(entry: Entry, copy: Copy, hashes: Mapping[str, str]) -> None:
    """Raise `RotationZooError` if a file differs from the sha256 in the index."""
    for name, file in entry.files.items():
        if file.sha256 not in (None, hashes[name]):
            problem = f"{name} of {copy.repo} is not the file that the index lists"
            hint = "run the command again; if that does not help, tell the owners of the repository"
            raise RotationZooError(f"{problem}: its sha256 differs", hint)


def _find_sizes(entry: Entry, copy: Copy, revision: str) -> dict[str, int]:
    """Name -> size in bytes, from the index or else from the hub. Raises `HubError` if the hub does
    not list a file, or if the total exceeds `MAX_BYTES`."""
    listed = open_hub(copy.hub).list_files(copy.repo, revision)
    sizes = {}
    for name, file in entry.files.items():
        path = copy.path_of(name)
        if path not in listed:
            problem = f"{copy.repo} at {revision} has no {path}"
            raise HubError(problem, SPELLING_HINT, missing=True)
        sizes[name] = listed[path] if file.size is None else file.size
    total = sum(sizes.values())
    # The sizes come from the hub, which may claim anything, even a negative number.
    if total > MAX_BYTES or min(sizes.values()) < 0:
        problem = f"{copy.repo} lists {total:,} bytes for {copy.path}"
        hint = "look at the repository, and fetch the files yourself if they are what you want"
        raise HubError(f"{problem}, more than rotations of a model take", hint)
    return sizes


def pull_first(
    loaded: LoadedIndex,
    entry: Entry,
    copies: list[Copy],
    local_dir: Path | None = None,
    progress: Progress = silent,
    demand: signatures.Demand = _NO_DEMAND,
) -> Pulled:
    """Pull the first of an entry's copies that exists: download it unless it is here already, check
    it, and move it to `local_dir` or into the cache.

    The next copy is tried only if one is missing: a hub that fails is not replaced by another.
    Raises `RotationZooError` and leaves nothing behind if a hash differs, or the artifact is not
    sound, of another model, or not signed as `demand` asks.
    """
    *first, last = map(loaded.locate, copies)
    for copy in first:
        try:
            return _pull_copy(loaded, entry, copy, local_dir, progress, demand)
        except HubError as error:
            if not error.missing:
                raise
    return _pull_copy(loaded, entry, last, local_dir, progress, demand)


def _pull_copy(
    loaded: LoadedIndex,
    entry: Entry,
    copy: Copy,
    local_dir: Path | None,
    progress: Progress,
    demand: signatures.Demand,
) -> Pulled:
    revision = loaded.revision_of(copy)
    what = f"{copy.path} of {copy.repo}"
    # Before anything is downloaded.
    expected = demand.expected(entry.signer, loaded.hub is None, what)
    if entry.format == "oscar":
        if expected:
            hint = "make rotations of your own with: rotationzoo calibrate " + entry.model
            raise RotationZooError(
                f"{what} has no signature, because its authors publish none", hint
            )
        return _pull_oscar(entry, copy, local_dir, progress)
    target = local_dir or _cache_folder(copy, revision)
    hashes = _hash_files(target, entry.files)
    if hashes is not None:
        artifact = Artifact.open(target, hashes)
        if unlisted := unlisted_files(artifact):
            hint = "move it elsewhere and run the same command again"
            raise RotationZooError(f"{target} holds more than was pulled: {unlisted[0]}", hint)
        finding = _check(loaded, entry, artifact, what, demand)
        remember(artifact.identity)
        here = ["it was already here"]
        return Pulled(target, entry, copy, revision, hashes, here, artifact, finding)
    _check_target(target, entry)
    revision = revision or open_hub(copy.hub).resolve(copy.repo)
    sizes = {name: file.size or 0 for name, file in entry.files.items()}
    with _downloaded(copy, revision, sizes, target, progress) as (folder, hashes):
        _check_hashes(entry, copy, hashes)
        progress("checking", 0, 0)
        artifact = Artifact.open(folder, hashes)
        checked = verify(artifact)
        if not checked.ok:
            raise RotationZooError(f"{what} is not sound: {checked.problems[0]}")
        finding = _check(loaded, entry, artifact, what, demand)
    remember(artifact.identity)
    moved = replace(artifact, folder=target)  # with everything that was read of it
    return Pulled(target, entry, copy, revision, hashes, artifact=moved, signature=finding)


def _check(
    loaded: LoadedIndex, entry: Entry, artifact: Artifact, what: str, demand: signatures.Demand
) -> signatures.Finding:
    """Check the model and the signature of an artifact whose files were just hashed."""
    check_entry(entry, artifact, what)
    listed = {name: artifact.folder / name for name in entry.files}
    # A signature that the index does not list does not count.
    signature = signatures.read_signature(artifact.folder) if SIGNATURE in listed else None
    signed = signatures.Signed(what, listed, signature, entry.signer, loaded.hub is None)
    return signatures.check_signature(signed, demand)


def _cache_folder(copy: Copy, revision: str | None) -> Path:
    """The default folder for pulled files, in huggingface_hub's cache of assets."""
    from huggingface_hub import cached_assets_path

    place = cached_assets_path("rotationzoo", namespace=copy.hub, subfolder=copy.repo)
    return storage.child(place, f"{revision or 'unpinned'}/{copy.path}")


def _hash_files(folder: Path, listed: Mapping[str, File]) -> dict[str, str] | None:
    """Name -> sha256 of the listed files in a folder; None if one is missing or differs."""
    hashes: dict[str, str] = {}
    # A killed process may have left the folder set aside under another name.
    folders.recover(folder)
    for name, file in listed.items():
        with suppress(RotationZooError):
            path = storage.regular_file(folder, name)
            # Comparing sizes first is cheaper than hashing.
            if storage.size_of(path) == file.size:
                hashes[name] = storage.sha256(path)
        if name not in hashes or hashes[name] != file.sha256:
            return None
    return hashes


def _check_target(target: Path, entry: Entry) -> None:
    """Raise `RotationZooError` if the target holds files that `pull` did not put there."""
    folders.check_name(target)
    names = {path.name for path in target.glob("*")}  # none if it is no folder
    is_pulled = MANIFEST in names and names <= {*PARTS, *entry.files}
    if os.path.lexists(target) and not (target.is_dir() and (is_pulled or not names)):
        raise RotationZooError(f"{target} exists and holds other files", hint=_WAY_OUT)


@contextmanager
def _downloaded(
    copy: Copy, revision: str, sizes: Mapping[str, int], target: Path, progress: Progress
) -> Iterator[tuple[Path, dict[str, str]]]:
    """Fetch the files of a copy into a new folder, for the block to check, and then move it to
    `target`; `sizes` are in bytes, by name. Yields the folder and name -> sha256. Raises
    `RotationZooError` if the disk is too small."""
    with disk_errors(target, _WAY_OUT), folders.temporary_sibling(target) as work:
        needed = sum(sizes.values())
        folders.check_room(work.parent, needed, _WAY_OUT)
        raw, clean = work / "download", work / "files"
        paths = {copy.path_of(name): size for name, size in sizes.items()}
        stage = f"downloading from {copy.repo} on {HUBS[copy.hub].title}"
        with tell_growth(lambda: raw.rglob("*"), stage, needed, progress):
            open_hub(copy.hub).fetch(copy.repo, revision, paths, raw)
        # The hubs' clients leave files of their own next to the downloads.
        clean.mkdir()
        for name in sizes:
            storage.regular_file(raw, copy.path_of(name)).rename(storage.child(clean, name))
        yield clean, {name: storage.sha256(clean / name) for name in sizes}
        folders.install(clean, target)
