"""Preparing an artifact for publication: the files to send, their folder, and their index entry."""

import datetime
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rotationzoo.artifact.manifest import STATISTICS, parse_manifest
from rotationzoo.artifact.measured import plain_arm
from rotationzoo.artifact.store import CARD, MANIFEST, SIGNATURE, Artifact
from rotationzoo.checks.verify import verify
from rotationzoo.codec.formats import FORMATS
from rotationzoo.codec.layout import CacheLayout
from rotationzoo.codec.size import bits_per_element
from rotationzoo.errors import RotationZooError, UsageError
from rotationzoo.report.card import render_card
from rotationzoo.storage import strict_json
from rotationzoo.storage.files import digest, regular_file, sha256
from rotationzoo.zoo.hubs.registry import DEFAULT_HUB
from rotationzoo.zoo.index import BITS_FORMAT, REPOSITORY, Copy, Entry, File, Listed
from rotationzoo.zoo.ownership import describe, listed_name
from rotationzoo.zoo.signing import signature_file
from rotationzoo.zoo.signing.make import SigningTool
from rotationzoo.zoo.signing.signature_file import claimed_signer, parse_bundle
from rotationzoo.zoo.signing.signer import Signer
from rotationzoo.zoo.signing.verify import read_signature, signed_part


@dataclass(frozen=True)
class Upload:
    """Everything that one artifact adds to a repository."""

    files: dict[str, Path | bytes]
    """Name -> file of the artifact, or content that was rendered for this upload."""
    path: str
    """The folder in the repository."""
    tag: str
    entry: Entry
    """The index entry. Its one copy names repository and folder; `push` replaces it with one that
    has the right hub and revision."""

    @property
    def message(self) -> str:
        """The title of the commit or pull request."""
        return f"Add {self.entry.model}, {self.path.split('/')[1]}"

    @property
    def is_signed(self) -> bool:
        """Whether it has a signature, such as that of an artifact that was pulled."""
        return SIGNATURE in self.files

    def signed_by(self, tool: SigningTool) -> "Upload":
        """The same upload with a new signature. Raises `RotationZooError`."""
        names = signed_part({name: file.sha256 or "" for name, file in self.entry.files.items()})
        signature, signer = tool.sign(
            {name: self.files[name] for name in names}, self.path.split("/")[1]
        )
        return self._with_signature(signature, signer)

    def _with_signature(self, signature: bytes, signer: Signer | None) -> "Upload":
        files = {**self.entry.files, SIGNATURE: _describe_file(signature)}
        entry = self.entry.model_copy(
            update={"files": dict(sorted(files.items())), "signer": signer}
        )
        return replace(self, files={**self.files, SIGNATURE: signature}, entry=entry)

    def with_earlier_signature(self, folder: Path) -> "Upload":
        """The same upload with the signature in the artifact's folder, if it is for these files.

        It is for others if something was added to the artifact, or is left out.
        """
        signature = read_signature(folder)
        if signature is None:
            return self
        bundle = parse_bundle(signature, f"the signature of {folder}")
        named = {name: file.sha256 or "" for name, file in self.entry.files.items()}
        if bundle.files != signed_part(named):
            return self
        signer = None
        if bundle.certificate is not None and signature_file.is_installed():
            signer = claimed_signer(bundle.certificate, str(folder))
        return self._with_signature(signature, signer)

    def listing(self, signs: bool = False) -> list[dict[str, Any]]:
        """Path, size and sha256 of each file, for `--dry-run`. `signs`: whether a signature is
        still to be made, whose size and sha256 are None."""
        files = {**self.entry.files, SIGNATURE: File()} if signs else self.entry.files
        rows = []
        for name, file in sorted(files.items()):
            rows.append({"path": f"{self.path}/{name}", "size": file.size, "sha256": file.sha256})
        return rows


def prepare_upload(
    artifact: Artifact, repo: str, statistics: bool = True, published: datetime.date | None = None
) -> Upload:
    """Verify an artifact and prepare its upload.

    `statistics`: whether to publish the statistics too. `published`: the day of the entry, by
    which the newest of several is found; today by default. Raises `RotationZooError` if the
    artifact is not sound or is bound to no model, and `UsageError` if `repo` is not a repository
    id.
    """
    if not re.fullmatch(REPOSITORY, repo):
        raise UsageError(f"{repo} is no repository", hint="write it as: owner/name")
    if not artifact.bound:
        raise RotationZooError(
            f"{artifact.folder} is not published: its model is not known",
            hint="import its files again with --model MODEL",
        )
    verification = verify(artifact)
    if not verification.ok:
        raise RotationZooError(
            f"{artifact.folder} is not published: {verification.problems[0]}",
            hint=f"see: rotationzoo verify {artifact.folder}",
        )
    files = _collect_files(artifact, statistics, repo)
    model = listed_name(artifact.manifest.model)
    folder = model.replace("/", "__")
    slug = f"{artifact.recipe.name}-{artifact.identity[:12]}"
    path = f"{folder}/{slug}"
    copy = Copy(hub=DEFAULT_HUB, repo=repo, path=path)
    day = published or datetime.datetime.now(datetime.UTC).date()
    entry = _make_entry(artifact, model, files, copy, day)
    upload = Upload(files, path, f"{folder}-{slug}", entry)
    return upload.with_earlier_signature(artifact.folder)


def _collect_files(artifact: Artifact, statistics: bool, repo: str) -> dict[str, Path | bytes]:
    """The files that the manifest lists, with a new manifest and card that list exactly these."""
    names = [name for name in artifact.manifest.files if statistics or name != STATISTICS]
    files: dict[str, Path | bytes] = {name: regular_file(artifact.folder, name) for name in names}
    listed = {name: artifact.content["files"][name] for name in names}
    content = {**artifact.content, "files": listed}
    files[MANIFEST] = strict_json.text(content)
    # Render the card again: the manifest has no hash of the one in the folder, so anybody may have
    # changed it. The new one says from where to pull.
    files[CARD] = render_card(parse_manifest(content, "the manifest"), repo).encode()
    return files


def _make_entry(
    artifact: Artifact, model: str, files: dict[str, Path | bytes], copy: Copy, day: datetime.date
) -> Entry:
    metrics = artifact.content["metrics"]
    return Entry(
        **describe(artifact),
        model=model,
        files={name: _describe_file(content) for name, content in sorted(files.items())},
        copies=[copy],
        evaluation=metrics.get("evaluation"),
        validation=metrics.get("validation"),
        summary=_list_figures(artifact),
        created=day.isoformat(),
    )


def _list_figures(artifact: Artifact) -> Listed:
    """The figures that a list of published rotations shows."""
    layout = CacheLayout.of_recipe(artifact.recipe, FORMATS[BITS_FORMAT])
    bits = bits_per_element(artifact.geometry, layout)
    figures: dict[str, Any] = {"bits_per_element": round(bits, 4)}
    evaluation = artifact.manifest.metrics.evaluation
    arm = None if evaluation is None else plain_arm(evaluation.arms, artifact.identity)
    if arm is not None:
        figures["perplexity_increase"] = arm.perplexity_increase
        if arm.all_tasks is not None:
            figures["answered"] = arm.all_tasks.answered
            figures["questions"] = arm.all_tasks.questions
    return Listed(**figures)


def _describe_file(content: Path | bytes) -> File:
    if isinstance(content, bytes):
        return File(size=len(content), sha256=digest(content))
    return File(size=content.stat().st_size, sha256=sha256(content))
