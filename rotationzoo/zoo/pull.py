"""Pulls published rotations to a local folder. Every hash is checked, and a failed pull leaves
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
from rotationzoo.zoo.hubs.protocol import HUBS, chosen_hubs, open_hub
from rotationzoo.zoo.index import Copy, Entry, File
from rotationzoo.zoo.lookup import LoadedIndex, choose_entry, find_index
from rotationzoo.zoo.ownership import check_entry
from rotationzoo.zoo.signed_index import check_index

_WAY_OUT = "choose another place with --local-dir"
_NO_DEMAND = signatures.Demand()
MAX_BYTES = 1 << 30  # of a file whose size is not in the index


@dataclass(frozen=True)
class Pulled:
    """Pulled rotations. `files`: name -> sha256. OSCAR's have no artifact and no signature."""

    path: Path
    entry: Entry
    copy: Copy
    revision: str | None
    files: dict[str, str]
    notes: list[str] = field(default_factory=list)
    artifact: Artifact | None = None
    signature: signatures.Finding | None = None


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
    """Fetch published rotations, check every hash, and log the result of the signature check.

    * `model`: such as `Qwen/Qwen3-8B`;
    * `recipe`: only rotations of this recipe; without it, scaled RoPE is the last choice;
    * `revision`: the model revision that the rotations were made for; by default the newest;
    * `repo`: the repository of a zoo, as `owner/name`, or a folder; by default ours;
    * `hub`: the hub to fetch from, such as `huggingface`; by default any of them;
    * `folder`: where to put the files; by default the cache of huggingface_hub;
    * `signers`: accepted signers: identities, or files of public keys (`.pem`);
    * `issuer`: the issuer of the identities; not needed for workflows of GitHub;
    * `require_signature`: refuse unsigned rotations, and an unsigned index of the repository;
    * `trust_config`: a file with the keys of a Sigstore other than the public one.

    Raises `RotationZooError` if no rotations match, for files that differ from the index, and for a
    signature that is wrong or not accepted.
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
        problem = f"the rotations of {entry.model} in {pulled.path} are not an artifact"
        hint = f"make one of them: rotationzoo import {pulled.path} --model {entry.model}"
        raise RotationZooError(problem, hint)
    return pulled.artifact


def _pull_oscar(entry: Entry, copy: Copy, local_dir: Path | None, progress: Progress) -> Pulled:
    """Download files without hashes. Raises `RotationZooError` unless they hold rotations."""
    revision = copy.revision or open_hub(copy.hub).resolve(copy.repo)
    target = local_dir or _cache_folder(copy, revision)
    if local_dir is not None:
        _check_target(target, entry)
    with _downloaded(entry, copy, revision, target, progress) as (folder, hashes):
        for name in entry.files:
            check_matrices(read_pt(folder / name))
    note = "no hash was published for these files: only their commit identifies them"
    return Pulled(target, entry, copy, revision, hashes, [note])


def pull_first(
    loaded: LoadedIndex,
    entry: Entry,
    copies: list[Copy],
    local_dir: Path | None = None,
    progress: Progress = silent,
    demand: signatures.Demand = _NO_DEMAND,
) -> Pulled:
    """Pull the first of an entry's copies that exists: download it unless it is already here, check
    it, and move it to `local_dir` or into the cache. No copy replaces one on a hub that fails.

    Raises `RotationZooError` and leaves nothing behind if a hash differs, or if the artifact is not
    sound, is for another model, or is not signed as `demand` requires.
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
    revision, what = loaded.revision_of(copy), f"{copy.path} of {copy.repo}"
    # Before anything is downloaded. Only an index that the user named says who must have signed.
    demand = demand.naming(None if loaded.hub else entry.signer, what)
    if entry.format == "oscar":
        if demand.signers:
            problem = f"{what} has no signature, because its authors publish none"
            hint = f"make your own rotations with: rotationzoo calibrate {entry.model}"
            raise RotationZooError(problem, hint)
        return _pull_oscar(entry, copy, local_dir, progress)
    target = local_dir or _cache_folder(copy, revision)
    hashes = _hash_files(target, entry.files)
    if hashes is not None:
        artifact = Artifact.open(target, hashes)
        if unlisted := unlisted_files(artifact):
            problem = f"{target} has files that were not pulled: {unlisted[0]}"
            raise RotationZooError(problem, "move it elsewhere and run the same command again")
        finding = _check(entry, artifact, what, demand)
        remember(artifact.identity)
        here = ["it was already here"]
        return Pulled(target, entry, copy, revision, hashes, here, artifact, finding)
    _check_target(target, entry)
    revision = revision or open_hub(copy.hub).resolve(copy.repo)
    with _downloaded(entry, copy, revision, target, progress) as (folder, hashes):
        progress("checking", 0, 0)
        artifact = Artifact.open(folder, hashes)
        checked = verify(artifact)
        if not checked.ok:
            raise RotationZooError(f"{what} is not sound: {checked.problems[0]}")
        finding = _check(entry, artifact, what, demand)
    remember(artifact.identity)
    moved = replace(artifact, folder=target)
    return Pulled(target, entry, copy, revision, hashes, artifact=moved, signature=finding)


def _check(
    entry: Entry, artifact: Artifact, what: str, demand: signatures.Demand
) -> signatures.Finding:
    """Check the model and the signature of an artifact whose files were just hashed."""
    check_entry(entry, artifact, what)
    listed = {name: artifact.folder / name for name in entry.files}
    # A signature that is not in the index does not count.
    signature = signatures.read_signature(artifact.folder) if SIGNATURE in listed else None
    signed = signatures.Signed(what, listed, signature, entry.signer)
    return signatures.check_signature(signed, demand)


def _cache_folder(copy: Copy, revision: str | None) -> Path:
    """The default folder for pulled files, in the asset cache of huggingface_hub."""
    from huggingface_hub import cached_assets_path

    place = cached_assets_path("rotationzoo", namespace=copy.hub, subfolder=copy.repo)
    return storage.child(place, f"{revision or 'unpinned'}/{copy.path}")


def _hash_files(folder: Path, listed: Mapping[str, File]) -> dict[str, str] | None:
    """Name -> sha256 of the listed files in a folder; None if one is missing or differs."""
    hashes: dict[str, str] = {}
    folders.recover(folder)
    for name, file in listed.items():
        with suppress(RotationZooError):
            path = storage.regular_file(folder, name)
            if storage.size_of(path) == file.size:  # much quicker to compare than hashes
                hashes[name] = storage.sha256(path)
        if name not in hashes or hashes[name] != file.sha256:
            return None
    return hashes


def _check_target(target: Path, entry: Entry) -> None:
    """Raise `RotationZooError` if the target holds files that `pull` did not put there."""
    folders.check_name(target)
    names = {path.name for path in target.glob("*")}  # none if it is not a folder
    is_pulled = MANIFEST in names and names <= {*PARTS, *entry.files}
    if os.path.lexists(target) and not (target.is_dir() and (is_pulled or not names)):
        raise RotationZooError(f"{target} exists and holds other files", hint=_WAY_OUT)


@contextmanager
def _downloaded(
    entry: Entry, copy: Copy, revision: str, target: Path, progress: Progress
) -> Iterator[tuple[Path, dict[str, str]]]:
    """Fetch the files of a copy to a new folder, let the block check them, then move the folder to
    `target`. Yields the folder and name -> sha256. Raises `RotationZooError` if a hash differs, or
    the disk is too small."""
    needed, hub = sum(file.size or 0 for file in entry.files.values()), open_hub(copy.hub)
    with disk_errors(target, _WAY_OUT), folders.temporary_sibling(target) as work:
        folders.check_room(work.parent, needed, _WAY_OUT)
        stage = f"downloading from {copy.repo} on {HUBS[copy.hub].title}"
        with tell_growth(lambda: work.rglob("*"), stage, needed, progress):
            for name, file in entry.files.items():
                most = MAX_BYTES if file.size is None else file.size
                hub.fetch(copy.repo, revision, f"{copy.path}/{name}", most, work)
        folder = storage.child(work, copy.path)
        hashes = {name: storage.sha256(folder / name) for name in entry.files}
        for name, hash in hashes.items():
            if entry.files[name].sha256 not in (None, hash):
                problem = f"{name} of {copy.repo} is not the file in the index: its sha256 differs"
                hint = "run the command again; if that does not help, tell the repository's owners"
                raise RotationZooError(problem, hint)
        yield folder, hashes
        folders.install(folder, target)
