"""An artifact -> a folder of a zoo repository, with the repository's own index, in one commit a
hub."""

import datetime
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rotationzoo.artifact.card import render_card
from rotationzoo.artifact.manifest import STATISTICS, parse_manifest
from rotationzoo.artifact.store import CARD, MANIFEST, Artifact
from rotationzoo.checks.verify import verify
from rotationzoo.errors import HubError, PartlyDone, RotationZooError, StaleParent, UsageError
from rotationzoo.storage import strict_json
from rotationzoo.storage.files import digest, regular_file, replace, sha256
from rotationzoo.storage.folders import held
from rotationzoo.zoo import index, ownership
from rotationzoo.zoo.hubs import Published, hub
from rotationzoo.zoo.index import Copy, Entry, File, Index

_COMMITS = 4  # tries, each on top of what somebody else has just committed


@dataclass(frozen=True)
class Upload:
    """What goes into a repository: the artifact's files by name, and where."""

    files: dict[str, Path | bytes]
    path: str
    tag: str
    entry: Entry
    """Without copies of its own yet."""


def prepare(artifact: Artifact, repo: str, statistics: bool = True) -> Upload:
    """Raises `RotationZooError` for an artifact that is not sound: it is verified first."""
    if not re.fullmatch(index.REPOSITORY, repo):
        raise UsageError(f"{repo} is no repository", hint="write it as: owner/name")
    if not artifact.bound:
        raise RotationZooError(
            f"{artifact.folder} is not published: nobody has said which model it is for",
            hint="import its files again with --model MODEL",
        )
    found = verify(artifact)
    if not found.ok:
        raise RotationZooError(
            f"{artifact.folder} is not published: {found.problems[0]}",
            hint=f"see: rotationzoo verify {artifact.folder}",
        )
    manifest = artifact.manifest
    names = [name for name in manifest.files if statistics or name != STATISTICS]
    files: dict[str, Path | bytes] = {name: regular_file(artifact.folder, name) for name in names}
    kept = {**artifact.content, "files": {name: artifact.content["files"][name] for name in names}}
    files[MANIFEST] = strict_json.text(kept)
    files[CARD] = render_card(
        parse_manifest(kept, "the manifest")
    ).encode()  # anew: of the file in the folder nothing is known
    slug = f"{artifact.recipe.name}-{artifact.identity[:12]}"
    model = ownership.listed_name(manifest.model)
    folder = model.replace("/", "__")
    path = f"{folder}/{slug}"
    entry = Entry(
        model=model,
        model_revision=manifest.model.revision,
        config_sha256=manifest.model.config_sha256,
        weights_fingerprint=manifest.model.weights_fingerprint,
        recipe=artifact.recipe.name,
        recipe_sha256=manifest.recipe_sha256,
        geometry=artifact.content["geometry"],
        files={
            name: File(size=size_of(content), sha256=digest_of(content))
            for name, content in sorted(files.items())
        },
        copies=[Copy(hub="huggingface", repo=repo, path=path)],
        evaluation=artifact.content["metrics"].get("evaluation"),
        validation=artifact.content["metrics"].get("validation"),
        created=datetime.datetime.now(datetime.UTC).date().isoformat(),
    )
    return Upload(files, path, f"{folder}-{slug}", entry)


def push(
    upload: Upload, repo: str, hubs: list[str], create_pr: bool = False, name: str = "ARTIFACT"
) -> dict[str, Published]:
    """Publish to each hub; hub -> where it is. What is there already makes no commit. `name` is the
    artifact's, for the hint.

    Raises `PartlyDone` if a hub took it and a later one did not, and `HubError` if the first
    refused.
    """
    done: dict[str, Published] = {}
    for place in hubs:
        try:
            done[place] = _push(upload, repo, place, create_pr)
        except HubError as error:
            if not done:
                raise
            raise PartlyDone(
                f"{', '.join(done)} took it and {place} did not: {error}",
                hint=f"finish with: rotationzoo push {name} {repo} --to {place}",
            ) from error
    return done


def extend(path: Path, entry: Entry) -> None:
    """Add an entry to an index file, which is made if it is not there and replaced whole."""
    path = path.resolve()
    with held(path.with_name(f".{path.name}.lock"), f"writing {path}"):
        before = index.read(path) if path.exists() else Index()
        replace(path, before.extended(entry).text().encode())


def pinned(upload: Upload, repo: str, done: Mapping[str, Published]) -> Entry:
    """The entry of what was published, with revisions that do not move: what another index
    lists."""
    copies = [
        Copy.model_validate({"hub": n, "repo": repo, "path": upload.path, "revision": p.revision})
        for n, p in done.items()
    ]
    return upload.entry.model_copy(update={"copies": copies})


def _push(upload: Upload, repo: str, name: str, create_pr: bool) -> Published:
    client = hub(name)
    for _ in range(_COMMITS):
        try:
            head: str | None = client.resolve(repo)
        except HubError as error:
            if not error.missing:
                raise
            head = None  # made on the way
        known = client.read(repo, head, index.NAME) if head else None
        before = index.parse(known, f"{index.NAME} of {repo}") if known else Index()
        ownership.check_unclaimed(before, upload.entry, repo)
        # On Hugging Face the commit is not known before it is made: the index is read at the commit
        # that holds the files.
        own = {
            "hub": name,
            "repo": repo,
            "path": upload.path,
            "revision": upload.tag if name == "modelscope" else None,
        }
        after = before.extended(
            upload.entry.model_copy(update={"copies": [Copy.model_validate(own)]})
        )
        files: dict[str, Path | bytes] = {
            f"{upload.path}/{file}": content for file, content in upload.files.items()
        }
        files |= _root_files(repo, after)
        try:
            return client.publish(
                repo,
                files,
                f"Add {upload.entry.model}, {upload.path.split('/')[1]}",
                head,
                upload.tag,
                create_pr,
            )
        except StaleParent:
            continue  # somebody else's commit came between: extend their index
    raise HubError(
        f"{repo} changes faster than it can be extended", hint="run the same command again later"
    )


def _root_files(repo: str, content: Index) -> dict[str, Path | bytes]:
    """The repository's own index and card, and the file by which Hugging Face counts downloads."""
    models = sorted({entry.model for entry in content.entries})
    bases = "".join(f"- {model}\n" for model in models if "/" in model)
    front = f"base_model:\n{bases}base_model_relation: quantized\n" if bases else ""
    rows = "".join(
        f"| {entry.model} | `{entry.model_revision or ''}` | {entry.recipe} | [{path}]({path}) |\n"
        for entry in content.entries
        for path in [entry.copies[0].path]
    )
    card = f"""---
library_name: rotationzoo
tags:
- kv-cache
- 2-bit
- rotation
{front}---

# A rotation zoo

Orthogonal matrices for 2-bit key/value caches, one folder each. `{index.NAME}` lists them with the sha256 of every file.

    rotationzoo pull {models[0]} --repo {repo}

| model | revision | recipe | folder |
|---|---|---|---|
{rows}"""
    return {
        index.NAME: content.text().encode(),
        "README.md": card.encode(),
        "config.json": b'{"library_name": "rotationzoo"}\n',
    }


def size_of(content: Path | bytes) -> int:
    return len(content) if isinstance(content, bytes) else content.stat().st_size


def digest_of(content: Path | bytes) -> str:
    return digest(content) if isinstance(content, bytes) else sha256(content)


def plan_of(upload: Upload) -> list[dict[str, Any]]:
    """What would go, for `--dry-run`."""
    return [
        {"path": f"{upload.path}/{n}", "size": f.size, "sha256": f.sha256}
        for n, f in upload.entry.files.items()
    ]
