"""Publishing an artifact to a zoo repository: its files and index entry, in one commit per hub."""

import datetime
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rotationzoo.artifact.manifest import STATISTICS, parse_manifest
from rotationzoo.artifact.measured import served_arm
from rotationzoo.artifact.store import ANSWERS, CARD, MANIFEST, REPORT, SIGNATURE, Artifact
from rotationzoo.checks.verify import verify
from rotationzoo.codec.size import CONTEXT
from rotationzoo.errors import HubError, PartlyDone, RotationZooError, StaleParent, UsageError
from rotationzoo.progress import Progress
from rotationzoo.report.card import render, render_card
from rotationzoo.report.page import files_of_report, make_report
from rotationzoo.report.tables import stored_bits
from rotationzoo.storage import files as storage
from rotationzoo.storage import folders, strict_json
from rotationzoo.zoo import index, signed_index
from rotationzoo.zoo import signing as signatures
from rotationzoo.zoo.hubs.protocol import DEFAULT_HUB, HUBS, Publication, Published, open_hub
from rotationzoo.zoo.ownership import check_unclaimed, describe, listed_name, not_published
from rotationzoo.zoo.signed_index import IndexSigner, read_own_index
from rotationzoo.zoo.signing import SigningTool

_ATTEMPTS = 4  # each after a commit by somebody else


@dataclass(frozen=True)
class Upload:
    """Everything that one artifact adds to a repository. `files`: name -> file of the artifact, or
    content for this upload. The one copy of `entry` gets its hub and revision from `push`."""

    files: dict[str, Path | bytes]
    path: str
    entry: index.Entry

    @property
    def is_signed(self) -> bool:
        """Whether it has a signature, such as that of a pulled artifact."""
        return SIGNATURE in self.files

    def signed_by(self, tool: SigningTool) -> "Upload":
        """The same upload with a new signature. Raises `RotationZooError`."""
        return self._with_signature(*tool.sign(self.files, self.path.split("/")[1]))

    def _with_signature(self, signature: bytes, signer: index.Signer | None) -> "Upload":
        files = {**self.entry.files, SIGNATURE: _describe_file(signature)}
        changes = {"files": dict(sorted(files.items())), "signer": signer}
        entry = self.entry.model_copy(update=changes)
        return replace(self, files={**self.files, SIGNATURE: signature}, entry=entry)

    def with_earlier_signature(self, folder: Path) -> "Upload":
        """The same upload, with the signature in the artifact's folder if it is still valid."""
        signature = signatures.read_signature(folder)
        if signature is None or self.files[MANIFEST] != (folder / MANIFEST).read_bytes():
            return self
        installed = signatures.is_installed()
        claimed = signatures.claimed_signer(signature, str(folder)) if installed else None
        signer = claimed if isinstance(claimed, index.Signer) else None
        return self._with_signature(signature, signer)

    def listing(self, signs: bool = False) -> list[dict[str, Any]]:
        """Path, size and sha256 of each file; None for a signature that `signs` will add."""
        files = {**self.entry.files, SIGNATURE: index.File()} if signs else self.entry.files
        listed = sorted(files.items())
        return [{"path": f"{self.path}/{name}", **file.model_dump()} for name, file in listed]


def prepare_upload(
    artifact: Artifact, repo: str, statistics: bool = True, published: datetime.date | None = None
) -> Upload:
    """Verify an artifact and prepare its upload. `published`: by default today. Raises
    `RotationZooError` if the artifact is not sound, and `UsageError` for an invalid `repo`."""
    repo = index.listed_as(repo)
    if repo != "." and not re.fullmatch(index.REPOSITORY, repo):
        hint = "write it as: owner/name, or a folder as: ./zoo"
        raise UsageError(f"{repo} is not a repository", hint)
    if problems := verify(artifact).problems:
        raise not_published(artifact, problems[0], f"see: rotationzoo verify {artifact.folder}")
    files = _collect_files(artifact, statistics, repo)
    model, metrics = listed_name(artifact.manifest.model), artifact.manifest.metrics
    path = f"{model.replace('/', '__')}/{artifact.recipe.name}-{artifact.identity[:12]}"
    day = published or datetime.datetime.now(datetime.UTC).date()
    evaluation = metrics.evaluation
    arm = evaluation and served_arm(evaluation.arms, artifact.identity, evaluation.format)
    summary = index.Listed(
        bits_per_element=round(stored_bits(artifact, CONTEXT), 4),
        perplexity_increase=arm.perplexity_increase if arm else None,
    )
    entry = index.Entry(
        **describe(artifact),
        model=model,
        files={name: _describe_file(content) for name, content in sorted(files.items())},
        copies=[index.Copy(hub=DEFAULT_HUB, repo=repo, path=path)],
        evaluation=artifact.content["metrics"].get("evaluation"),
        validation=artifact.content["metrics"].get("validation"),
        summary=summary,
        created=day.isoformat(),
    )
    return Upload(files, path, entry).with_earlier_signature(artifact.folder)


def _collect_files(artifact: Artifact, statistics: bool, repo: str) -> dict[str, Path | bytes]:
    """The files in the manifest, and a new manifest and card for them. The page and its picture are
    drawn again unless they are signed, because an evaluation may have been saved since."""
    drawn: dict[str, bytes] = {}
    if REPORT in artifact.manifest.files and not os.path.lexists(artifact.folder / SIGNATURE):
        drawn = files_of_report(make_report(artifact))
    left_out = set() if statistics else {STATISTICS}
    if drawn:  # there may no longer be a picture
        left_out |= {ANSWERS} - drawn.keys()
    names = [name for name in {**artifact.manifest.files, **drawn} if name not in left_out]
    files: dict[str, Path | bytes] = {
        name: drawn.get(name) or storage.regular_file(artifact.folder, name) for name in names
    }
    listed = {name: artifact.content["files"].get(name) for name in names}
    listed |= {name: _describe_file(content).model_dump() for name, content in drawn.items()}
    content = {**artifact.content, "files": listed}
    files[MANIFEST] = strict_json.text(content)
    # The card in the folder has no hash, so anyone may have changed it.
    files[CARD] = render_card(parse_manifest(content, "the manifest"), repo).encode()
    return files


def _describe_file(content: Path | bytes) -> index.File:
    if isinstance(content, bytes):
        return index.File(size=len(content), sha256=storage.digest(content))
    return index.File(size=content.stat().st_size, sha256=storage.sha256(content))


@dataclass(frozen=True)
class Destination:
    """The repository to publish to, by commits or, with `create_pr`, a pull request."""

    repo: str
    hubs: list[str]
    create_pr: bool = False


def push(
    upload: Upload, to: Destination, name: str, progress: Progress, signer: IndexSigner | None
) -> dict[str, Published]:
    """Publish to each hub in order, and return hub -> place. `name`: the artifact in hints. Raises
    `RotationZooError` if the first hub or its index refuses, and `PartlyDone` for a later one."""
    published: dict[str, Published] = {}
    megabytes = sum(file["size"] for file in upload.listing()) / 1e6
    for hub_name in to.hubs:
        progress(f"sending {megabytes:,.0f} MB to {to.repo} on {HUBS[hub_name].title}", 0, 0)
        try:
            published[hub_name] = _push_to_hub(upload, to, hub_name, signer)
        except RotationZooError as error:  # such as an index signed by others
            if not published:
                raise
            problem = f"{', '.join(published)} accepted it and {hub_name} did not: {error}"
            hint = f"finish with: rotationzoo push {name} {to.repo} --to {hub_name}"
            raise PartlyDone(problem, hint) from error
    return published


def check_indexes(upload: Upload, to: Destination, signer: IndexSigner) -> None:
    """Raise `RotationZooError` if this signer may not extend the index of a destination. Called
    before signing, because a public log keeps keyless signatures forever."""
    for hub_name in to.hubs:
        before = read_own_index(hub_name, to.repo)
        check_unclaimed(before.content, upload.entry, to.repo)
        signer.check(before)


def extend_index_file(
    path: Path, upload: Upload, repo: str, published: Mapping[str, Published]
) -> None:
    """Add a published artifact, with fixed revisions, to an index file, which may be new."""
    copies = [
        index.Copy(hub=hub_name, repo=repo, path=upload.path, revision=place.revision)
        for hub_name, place in published.items()
    ]
    entry, path = upload.entry.model_copy(update={"copies": copies}), path.resolve()
    # With a lock, so that simultaneous commands do not lose entries.
    with folders.locked(folders.sibling(path, "lock"), f"writing {path}"):
        before = index.read(path) if path.exists() else index.Index()
        folders.replace_file(path, before.extended(entry).text().encode())


def _push_to_hub(
    upload: Upload, to: Destination, hub_name: str, signer: IndexSigner | None
) -> Published:
    hub, repo, path = open_hub(hub_name), to.repo, upload.path
    tag, message = path.replace("/", "-"), f"Add {upload.entry.model}, {path.split('/')[1]}"
    # An index cannot contain the hash of its own commit: readers use the commit of the index.
    revision, named = tag if hub.pins_by_tag else None, index.listed_as(repo)
    copy = index.Copy(hub=hub_name, repo=named, path=path, revision=revision)
    entry = upload.entry.model_copy(update={"copies": [copy]})
    for _ in range(_ATTEMPTS):
        before = read_own_index(hub_name, repo)
        check_unclaimed(before.content, entry, repo)
        files = {f"{path}/{name}": content for name, content in upload.files.items()}
        content = before.content.extended(entry)
        if signer is not None:
            content, files[signed_index.NAME] = signer.sign(before, content)
        elif before.signature is not None:
            problem = f"the index of {repo} is signed, and this push would break the signature"
            hint = "sign it again: --sign key.pem, or in CI: --sign keyless"
            raise RotationZooError(problem, hint)
        files |= _render_root_files(named, content)
        try:
            publication = Publication(repo, files, message, before.revision, tag, to.create_pr)
            return hub.publish(publication)
        except StaleParent:
            continue  # extend the index of the new head
    problem = f"{repo} changes faster than a push can extend it"
    raise HubError(problem, "run the same command again later")


def _render_root_files(repo: str, content: index.Index) -> dict[str, bytes]:
    """Path -> content of the index, the card, and the file that Hugging Face counts."""
    models = sorted({entry.model for entry in content.entries})
    shown = {"index_name": index.NAME, "entries": content.entries, "models": models}
    card = render("zoo.md.jinja", repo=repo, **shown)
    contents = content.text(), card, '{"library_name": "rotationzoo"}\n'
    return {name: text.encode() for name, text in zip(index.ROOT_FILES, contents, strict=True)}
