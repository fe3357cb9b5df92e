"""A published rotation -> a folder on this machine, every hash checked, whole or not there."""

import json
import shutil
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rotationzoo import foreign, index
from rotationzoo.artifact import Artifact, disk_errors, install, sha256, temporary_sibling
from rotationzoo.collect import Progress, silent
from rotationzoo.engines import torch_files
from rotationzoo.errors import HubError, RotationZooError
from rotationzoo.hubs import hub
from rotationzoo.index import Copy, Entry, File, Index
from rotationzoo.verify import verify

LOCK = "zoo.lock.json"
ZOO = "rotationzoo/zoo"


@dataclass(frozen=True)
class Found:
    """An index and where it was read: in words, and if it is a repository's own, which one at which revision."""

    content: Index
    origin: str
    hub: str | None = None
    repo: str | None = None
    revision: str | None = None


@dataclass(frozen=True)
class Pulled:
    path: Path
    entry: Entry
    copy: Copy
    revision: str | None
    files: dict[str, str]
    """Name -> sha256 of what is on the disk."""
    notes: list[str] = field(default_factory=list)


def find_index(place: str | None, repo: str, hubs: list[str]) -> Found:
    """The index at a path or URL, or else the zoo repository's own, or else the copy that came with this package."""
    if place is not None:
        if place.startswith(("http://", "https://")):
            return Found(index.parse(_get(place), place), place)
        return Found(index.read(Path(place).expanduser()), place)
    reasons = []
    for name in hubs:
        client = hub(name)
        try:
            revision = client.resolve(repo)
            text = client.read(repo, revision, index.NAME)
        except HubError as error:
            reasons.append(str(error))
            continue
        if text is not None:
            origin = f"the index of {repo} on {name} at {revision}"
            return Found(index.parse(text, origin), origin, name, repo, revision)
    why = f" ({reasons[0]})" if reasons else ""
    return Found(index.read(index.WHEEL_COPY), f"the index that came with rotationzoo{why}")


def choose(found: Found, model: str, revision: str | None, recipe: str | None, hubs: list[str]) -> tuple[Entry, Copy, str]:
    """The best entry of a model and the first of its places, and in words why this one: that of the model's revision, or
    else the newest. Raises `RotationZooError` if there is none."""
    matching = [e for e in found.content.entries if e.model.lower() == model.lower() and recipe in (None, e.recipe)]
    matching = [e for e in matching if any(copy.hub in hubs for copy in e.copies)]
    if not matching:
        raise RotationZooError(
            f"{found.origin} has no rotation for {model}" + (f" with the recipe {recipe}" if recipe else ""),
            hint=f"see what there is with: rotationzoo list; or make one with: rotationzoo calibrate {model}",
        )
    exact = [e for e in matching if revision and e.model_revision == revision]
    entry = max(exact or matching, key=lambda e: (e.format == "rotationzoo", e.created or ""))
    made_for = f"revision {entry.model_revision}" if entry.model_revision else "a revision that nobody recorded"
    why = f"{entry.recipe} for {made_for} of {entry.model}"
    if revision and not exact:
        why += f": there is none for {revision}, this is the newest"
    copy = next(copy for name in hubs for copy in entry.copies if copy.hub == name)
    return entry, copy, why


def pull(found: Found, entry: Entry, copy: Copy, local_dir: Path | None = None, progress: Progress = silent) -> Pulled:
    """Download what is not here yet, check it, and put it in place. Raises `RotationZooError`, and leaves nothing behind, if a
    hash differs or the artifact is not sound."""
    client = hub(copy.hub)
    own = found.hub == copy.hub and found.repo == copy.repo
    revision = copy.revision or (found.revision if own else None)
    target = local_dir or cache_folder(copy, revision if entry.format == "rotationzoo" else None)
    if entry.format == "oscar":
        return _pull_foreign(entry, copy, target, progress)
    if (there := hashes(target, entry.files)) is not None:
        return Pulled(target, entry, copy, revision, there, ["it was here already"])
    _check_target(target)
    revision = revision or client.resolve(copy.repo)
    with disk_errors(target), temporary_sibling(target) as work:
        progress("downloading", 0, 0)
        got = _download(copy, revision, list(entry.files), work)
        for name, file in entry.files.items():
            if sha256(got / name) != file.sha256:
                raise RotationZooError(
                    f"{name} of {copy.repo} is not the file that the index lists: its sha256 differs",
                    hint="run the same command again; if it stays so, tell the owners of the repository",
                )
        progress("checking", 0, 0)
        checked = verify(Artifact.open(got))
        if not checked.ok:
            raise RotationZooError(f"{copy.path} of {copy.repo} is not sound: {checked.problems[0]}")
        install(got, target)
    there = hashes(target, entry.files)
    assert there is not None
    return Pulled(target, entry, copy, revision, there)


def is_there(found: Found, entry: Entry) -> bool:
    """Whether some hub lists all files of an entry."""
    for copy in entry.copies:
        own = found.revision if (found.hub, found.repo) == (copy.hub, copy.repo) else None
        try:
            names = hub(copy.hub).list_files(copy.repo, copy.revision or own)
        except HubError:
            continue
        if all(f"{copy.path}/{name}" in names for name in entry.files):
            return True
    return False


def cache_folder(copy: Copy, revision: str | None) -> Path:
    """Where pulled files live unless told otherwise: huggingface_hub's folder for what other libraries keep."""
    from huggingface_hub import cached_assets_path

    place = cached_assets_path("rotationzoo", namespace=copy.hub, subfolder=copy.repo)
    return place / (revision or "unpinned") / copy.path


def hashes(folder: Path, files: Mapping[str, File]) -> dict[str, str] | None:
    """sha256 of each file, or None if one is missing or not as listed."""
    found: dict[str, str] = {}
    for name, file in files.items():
        path = folder / name
        if not path.is_file() or (found.setdefault(name, sha256(path)) != file.sha256):
            return None
    return found


def _download(copy: Copy, revision: str | None, names: list[str], work: Path) -> Path:
    """The files of a copy in `work`; returns the folder that holds them, and nothing but them."""
    raw = work / "download"
    hub(copy.hub).fetch(copy.repo, revision, [f"{copy.path}/{name}" for name in names], raw)
    clean = work / "files"
    for name in names:  # without what the clients put beside them
        (clean / name).parent.mkdir(parents=True, exist_ok=True)
        (raw / copy.path / name).rename(clean / name)
    return clean


def _pull_foreign(entry: Entry, copy: Copy, target: Path, progress: Progress) -> Pulled:
    """Files that were published without hashes: what is downloaded first is remembered, and later downloads must agree."""
    lock = _read_lock(target)
    notes = ["no hash was published for these files: revision and hashes are recorded beside them"]
    try:
        revision = copy.revision or hub(copy.hub).resolve(copy.repo)
    except HubError:
        if lock is None or hashes(target, lock[1]) is None:
            raise
        held = hashes(target, lock[1])
        assert held is not None
        return Pulled(target, entry, copy, lock[0], held, ["the hub cannot be reached; these are the files recorded earlier"])
    if lock and lock[0] == revision and (there := hashes(target, lock[1])) is not None:
        return Pulled(target, entry, copy, revision, there, ["it was here already, as recorded"])
    if lock is None:
        _check_target(target)
    with disk_errors(target), temporary_sibling(target) as work:
        progress("downloading", 0, 0)
        got = _download(copy, revision, list(entry.files), work)
        now = {name: File(size=(got / name).stat().st_size, sha256=sha256(got / name)) for name in entry.files}
        for name, file in now.items():
            known = [f.sha256 for f in (entry.files[name], lock[1].get(name) if lock else None) if f and f.sha256]
            if any(file.sha256 != earlier for earlier in known):
                raise RotationZooError(
                    f"{name} of {copy.repo} at {revision} is not the file that was recorded: its sha256 differs",
                    hint=f"its owners may have replaced it; to take the new one, remove {target} and run the command again",
                )
            _check_foreign(got / name)
        content = {"repo": copy.repo, "revision": revision, "files": {n: f.model_dump() for n, f in now.items()}}
        (got / LOCK).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        install(got, target)
    return Pulled(target, entry, copy, revision, {n: f.sha256 or "" for n, f in now.items()}, notes)


def _check_foreign(path: Path) -> None:
    """Raise `RotationZooError` unless a `.pt` file of OSCAR's makers holds an orthogonal matrix for each layer."""
    foreign.check_matrices(torch_files.read(path))


def _read_lock(target: Path) -> tuple[str, dict[str, File]] | None:
    try:
        content = json.loads((target / LOCK).read_text(encoding="utf-8"))
        return content["revision"], {name: File(**file) for name, file in content["files"].items()}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _check_target(target: Path) -> None:
    """Nothing of somebody else's is replaced."""
    ours = (target / "manifest.json").is_file() or (target / LOCK).is_file()
    if target.exists() and not ours and any(target.iterdir()):
        raise RotationZooError(f"{target} exists and holds other files", hint="choose another place with --local-dir")
    if target.is_dir() and not ours:
        shutil.rmtree(target, ignore_errors=True)


def _get(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.read()
    except OSError as error:
        raise HubError(f"{url} cannot be read: {error}", hint="check the address given with --index") from error
