"""`rotationzoo push`: verify an artifact, sign it if asked, and publish it."""

import shlex
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rotationzoo.cli.next_steps import shell_line, typed_words
from rotationzoo.cli.output import Output, say, table
from rotationzoo.cli.progress_bar import show_progress
from rotationzoo.errors import RotationZooError, UsageError
from rotationzoo.settings import ArtifactFolder, Signing
from rotationzoo.settings_base import argument, flag, option
from rotationzoo.zoo.hubs.protocol import DEFAULT_HUB, HUB_NAMES, HubOrBoth, chosen_hubs, is_folder

if TYPE_CHECKING:
    from rotationzoo.artifact.store import Artifact
    from rotationzoo.zoo.hubs.protocol import Published
    from rotationzoo.zoo.push import Destination, Upload
    from rotationzoo.zoo.signed_index import IndexSigner

KEYLESS, NONE = "keyless", "none"
_CI_JOB = "a job of GitHub Actions with `id-token: write`"
_IN_CI = f"{_CI_JOB} signs what it publishes unless told otherwise, and that"


def choose_signer(signing: Signing) -> "IndexSigner | None":
    """The signer of the upload and the index, or None. Raises `UsageError` for a wrong `--sign`."""
    from rotationzoo.zoo.signed_index import IndexSigner
    from rotationzoo.zoo.signing import SigningTool, can_sign_in_ci

    sign, why = signing.sign, "signing"
    if sign is None and can_sign_in_ci():
        sign, why = KEYLESS, _IN_CI
    if sign in (None, NONE):
        if signing.adopt_index:
            raise UsageError("--adopt-index needs a signature", hint="add: --sign key.pem")
        return None
    key = None if sign == KEYLESS else Path(sign).expanduser()
    if key is not None and not key.is_file():
        hint = "write: --sign key.pem, or --sign keyless"
        raise UsageError(f"--sign {sign} is not the file of a key", hint)
    return IndexSigner(SigningTool(key, signing.trust_config, why), signing.adopt_index)


def publish(
    out: Output,
    artifact: "Artifact",
    upload: "Upload",
    destination: "Destination",
    signer: "IndexSigner | None",
    signing: Signing,
) -> tuple["Upload", dict[str, "Published"]]:
    """Check, sign and publish an upload, and print who signed it. A signature that it came with is
    kept unless `--sign` is given. Returns the signed upload, and hub -> its place."""
    from rotationzoo.zoo.ownership import check_model
    from rotationzoo.zoo.push import check_indexes, push

    check_model(artifact)
    index_signer = None if is_folder(destination.repo) else signer
    if index_signer is not None:
        check_indexes(upload, destination, index_signer)
    elif signer is not None:
        out.note("Note: the index is not signed: its signature would name a repository on a hub")
    if signer is not None and (signing.sign or not upload.is_signed):
        upload = upload.signed_by(signer.tool)
        out.note(f"Note: it is signed by {upload.entry.signer}")
    elif upload.is_signed:
        named = upload.entry.signer
        claim = "" if named is None else f", which names {named} and was not checked"
        out.note(f"Note: it keeps the signature that it came with{claim}")
    else:
        out.note("Note: it is not signed; to sign it, add: --sign key.pem, or --sign keyless")
    words = [str(artifact.folder), *signing.words, *["--create-pr"] * destination.create_pr]
    with show_progress(out) as progress:
        return upload, push(upload, destination, shlex.join(words), progress, index_signer)


def push_command(
    artifact: ArtifactFolder,
    signing: Signing,
    out: Output,
    repo: str = argument("The zoo: owner/name, or a folder as ./zoo.", metavar="REPO"),
    to: HubOrBoth = option("The hub to publish to.", default=DEFAULT_HUB),
    create_pr: bool = flag("Open a pull request (Hugging Face)."),
    no_statistics: bool = flag("Leave out the statistics."),
    index: Path | None = option("Also list it in this zoo_index.json, with pinned revisions."),
    published: datetime | None = option(
        "For a copy: the day it was first published (today).", formats=["%Y-%m-%d"]
    ),
    anyway: bool = flag("Publish it even if its evaluation advises against it."),
    dry_run: bool = flag("Show what would be uploaded, without reaching a hub."),
) -> None:
    """Verify an artifact and publish it, in one commit per hub.

    rotationzoo push rotations/Qwen3-8B-transform my-org/rotationzoo --to both
    """
    from rotationzoo.artifact.store import ANSWERS, Artifact
    from rotationzoo.report.charts import NOT_DRAWN, is_installed
    from rotationzoo.zoo.push import Destination, extend_index_file, prepare_upload
    from rotationzoo.zoo.signed_index import root_names

    signer, anew = choose_signer(signing), signing.sign is not None
    opened = Artifact.open(artifact)
    if not anyway:
        check_use(opened)
    upload = prepare_upload(opened, repo, not no_statistics, published and published.date())
    if ANSWERS in opened.manifest.files.keys() - upload.files and not is_installed():
        out.notes([NOT_DRAWN])
    if index is not None and is_folder(repo):
        raise UsageError("--index lists what is on hubs, not in a folder", "leave out --index")
    if dry_run:
        signs, on_hub = signer is not None and (anew or not upload.is_signed), not is_folder(repo)
        root_files = root_names(signed=signer is not None and on_hub)
        show_push_plan(out, repo, upload.listing(signs), root_files)
        out.suggest(*typed_words("--dry-run"))
        return
    # After the dry run, because it asks a hub for the model's config.
    destination = Destination(repo, chosen_hubs(to, repo), create_pr)
    upload, places = publish(out, opened, upload, destination, signer, signing)
    if index is not None:
        extend_index_file(index, upload, repo, places)
    data: dict[str, Any] = {"repo": repo, "path": upload.path, "hubs": {}}
    lines = []
    for name, place in places.items():
        data["hubs"][name] = asdict(place)
        change = "published" if place.changed else "nothing new"
        lines.append(f"{name}: {change}, revision {place.revision}, {place.url}")
    revisions = "\n".join(place.revision for place in places.values())
    out.result(data, revisions, lambda: say(*lines))
    hub = destination.hubs[0]
    read_from = ["--from", hub] if hub in HUB_NAMES[1:] else []
    # A pull request cannot be pulled yet.
    step = ["list"] if create_pr else ["pull", upload.entry.model]
    out.suggest(*step, *read_from, "--repo", repo)


def check_use(artifact: "Artifact") -> None:
    """Raise `RotationZooError` if the artifact's own evaluation speaks against its use."""
    evaluation = artifact.manifest.metrics.evaluation
    for decision in evaluation.verdict.decisions if evaluation else ():
        if decision.action in ("refuse", "nothing"):
            raise RotationZooError(
                f"{artifact.folder} is not worth publishing by its own evaluation: "
                f"{decision.words[0].rstrip('.')}",
                hint=f"to publish it anyway: {shell_line(*typed_words(), '--anyway')}",
            )


def show_push_plan(
    out: Output, repo: str, files: list[dict[str, Any]], root_files: list[str]
) -> None:
    """Print what would be uploaded: the files of `Upload.listing`, and those of every push."""
    rows = []
    for file in files:
        size = "not made yet" if file["size"] is None else f"{file['size']:,}"
        rows.append([file["path"], size])
    data, names = {"repo": repo, "files": files, "root_files": root_files}, [row[0] for row in rows]
    title, columns = f"would be uploaded to {repo}", ["file", "bytes"]
    out.result(data, "\n".join(names), lambda: table(title, columns, rows))
    out.note(f"Note: the commit also writes {', '.join(root_files)}")
