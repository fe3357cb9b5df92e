"""`rotationzoo push`: verify an artifact and publish it."""

from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rotationzoo.cli.command_line import typed_words
from rotationzoo.cli.library_logs import hush_libraries
from rotationzoo.cli.option_values import chosen_hubs
from rotationzoo.cli.options import (
    AdoptIndex,
    ArtifactFolder,
    HubOrBoth,
    Json,
    Quiet,
    SignWith,
    TrustConfig,
)
from rotationzoo.cli.output import Output, say, table
from rotationzoo.cli.progress_bar import show_progress
from rotationzoo.cli.signing import choose_tool, index_signer, sign_upload
from rotationzoo.zoo.hubs.registry import DEFAULT_HUB

if TYPE_CHECKING:
    from rotationzoo.zoo.hubs.protocol import Published
    from rotationzoo.zoo.push import Destination


def push_command(
    artifact: ArtifactFolder,
    repo: Annotated[str, typer.Argument(help="The zoo repository, as owner/name.", metavar="REPO")],
    to: Annotated[HubOrBoth, typer.Option(help="Which hub.")] = DEFAULT_HUB,
    create_pr: Annotated[
        bool, typer.Option("--create-pr", help="As a pull request (Hugging Face).")
    ] = False,
    no_statistics: Annotated[
        bool, typer.Option("--no-statistics", help="Leave the statistics behind.")
    ] = False,
    index: Annotated[
        Path | None,
        typer.Option(help="Also list it in this zoo_index.json, with pinned revisions."),
    ] = None,
    published: Annotated[
        datetime | None,
        typer.Option(formats=["%Y-%m-%d"], help="When it was first published, of a copy (today)."),
    ] = None,
    sign: SignWith = None,
    adopt_index: AdoptIndex = False,
    trust_config: TrustConfig = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would go; reach no hub.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Verify an artifact and publish it, in one commit per hub.

    rotationzoo push rotations/Qwen3-8B-oscar my-org/rotationzoo --to both
    """
    out = Output(json, quiet)
    hush_libraries(models=False)
    from rotationzoo.artifact.store import Artifact
    from rotationzoo.zoo.ownership import check_model
    from rotationzoo.zoo.push import (
        Destination,
        check_indexes,
        extend_index_file,
        pinned_entry,
        push,
    )
    from rotationzoo.zoo.signed_index import root_names
    from rotationzoo.zoo.upload import prepare_upload

    tool = choose_tool(sign, trust_config)
    signer = index_signer(tool, adopt_index)
    opened = Artifact.open(artifact)
    day = published and published.date()
    upload = prepare_upload(opened, repo, not no_statistics, day)
    if dry_run:
        signs = tool is not None and (sign is not None or not upload.is_signed)
        show_push_plan(out, repo, upload.listing(signs), root_names(signed=signer is not None))
        out.suggest(*typed_words("--dry-run"))
        return
    # After the dry run, because this asks a hub for the model's config.
    check_model(opened)
    destination = Destination(repo, chosen_hubs(to), create_pr)
    if signer is not None:
        check_indexes(upload, destination, signer)
    upload = sign_upload(out, upload, tool, anew=sign is not None)
    with show_progress(out) as progress:
        places = push(upload, destination, str(artifact), progress, signer)
    if index is not None:
        extend_index_file(index, pinned_entry(upload, repo, places))
    show_push(out, repo, upload.path, places)
    _suggest_next(out, upload.entry.model, repo, destination)


def _suggest_next(out: Output, model: str, repo: str, destination: "Destination") -> None:
    """Suggest to fetch what was published; of a pull request, to see what the repository lists."""
    hub = destination.hubs[0]
    place = ["--repo", repo] if hub == DEFAULT_HUB else ["--from", hub, "--repo", repo]
    out.suggest(*(["list"] if destination.create_pr else ["pull", model]), *place)


def show_push_plan(
    out: Output, repo: str, files: list[dict[str, Any]], root_files: list[str]
) -> None:
    """Print what would be uploaded.

    - `files`: path and size in bytes of each file; None for a signature that is still to be made.
    - `root_files`: the names of the repository's own files, which a push writes anew.
    """
    rows = []
    for file in files:
        size = "not made yet" if file["size"] is None else f"{file['size']:,}"
        rows.append([file["path"], size])
    names = [file["path"] for file in files]
    out.result(
        {"repo": repo, "files": files, "root_files": root_files},
        "\n".join(names),
        lambda: table(f"would go to {repo}", ["file", "bytes"], rows),
    )
    out.note(f"Note: the commit also writes {', '.join(root_files)}")


def show_push(out: Output, repo: str, path: str, published: dict[str, "Published"]) -> None:
    """Print where the artifact is. `published`: hub -> its place there."""
    data = {
        "repo": repo,
        "path": path,
        "hubs": {name: asdict(place) for name, place in published.items()},
    }

    def human() -> None:
        for name, place in published.items():
            change = "published" if place.changed else "nothing new"
            say(f"{name}: {change}, revision {place.revision}, {place.url}")

    out.result(data, "\n".join(place.revision for place in published.values()), human)
