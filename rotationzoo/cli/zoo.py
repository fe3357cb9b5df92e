"""Commands about what is published: push, pull, list, regenerate. What is slow to import is
imported inside."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rotationzoo.cli.options import (
    ArtifactFolder,
    Device,
    DeviceMap,
    IndexPlace,
    Json,
    MaxMemory,
    Quiet,
    ZooRepo,
    app,
    default_output,
    named,
)
from rotationzoo.cli.output import Output, hush_libraries
from rotationzoo.engines.registry import PullEngineName
from rotationzoo.errors import PartlyDone, UsageError
from rotationzoo.zoo.hubs.registry import DEFAULT_HUB, HUB_NAMES, HubName

if TYPE_CHECKING:
    from rotationzoo.zoo.lookup import LoadedIndex

    HubOrBoth = str
    HubOrAny = str
else:
    HubOrBoth = Literal[(*HUB_NAMES, "both")]
    HubOrAny = Literal[(*HUB_NAMES, "any")]

BOTH = list(HUB_NAMES)


@app.command()
def push(
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
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would go; reach no hub.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Verify an artifact and publish it, in one commit a hub.

    rotationzoo push rotations/Qwen3-8B-oscar my-org/rotationzoo --to both
    """
    out = Output(json, quiet)
    hush_libraries()
    from rotationzoo.artifact.store import Artifact
    from rotationzoo.cli.tables import show_push, show_push_plan
    from rotationzoo.zoo.ownership import check_model
    from rotationzoo.zoo.push import extend_index_file, pinned_entry
    from rotationzoo.zoo.push import push as push_upload
    from rotationzoo.zoo.upload import prepare_upload

    opened = Artifact.open(artifact)
    upload = prepare_upload(opened, repo, not no_statistics)
    if dry_run:
        show_push_plan(out, repo, upload.listing())
        return
    check_model(opened)
    hubs = BOTH if to == "both" else [str(to)]
    done = push_upload(upload, repo, hubs, create_pr, str(artifact))
    if index is not None:
        extend_index_file(index, pinned_entry(upload, repo, done))
    show_push(out, repo, upload.path, done)


def _read_index(out: Output, place: str | None, repo: str | None, hub: str) -> "LoadedIndex":
    """The index that the options name."""
    from rotationzoo.zoo import lookup

    found = lookup.find_index(place, repo, hub)
    out.note(f"Read {found.origin}")
    return found


@app.command()
def pull(
    model: Annotated[
        str, typer.Argument(help="The model whose rotations to fetch, as Qwen/Qwen3-8B.")
    ],
    from_: Annotated[HubOrAny, typer.Option("--from", help="Which hub.")] = "any",
    revision: Annotated[
        str | None, typer.Option(help="The model's revision that they should be made for.")
    ] = None,
    recipe: Annotated[str | None, typer.Option(help="Only rotations of this recipe.")] = None,
    local_dir: Annotated[
        Path | None, typer.Option(help="Put them here and not into the cache.")
    ] = None,
    to: Annotated[
        PullEngineName | None,
        typer.Option("--to", help="Also export them for this engine."),
    ] = None,
    index: IndexPlace = None,
    repo: ZooRepo = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Fetch rotations that somebody published, with every hash checked.

    rotationzoo pull Qwen/Qwen3-8B --to sglang
    """
    out = Output(json, quiet)
    hush_libraries()
    from rotationzoo.cli.tables import show_pull
    from rotationzoo.zoo import lookup
    from rotationzoo.zoo import pull as pulling

    hubs = BOTH if from_ == "any" else [str(from_)]
    found = _read_index(out, index, repo, hubs[0])
    entry, copies, why = lookup.choose_entry(found, model, revision, recipe, hubs)
    with out.progress() as progress:
        pulled = pulling.pull_first(found, entry, copies, named(local_dir), progress)
    out.note(f"Took {why}, from {pulled.copy.repo} on {pulled.copy.hub}")
    if to is None:
        show_pull(out, pulled)
        return
    from rotationzoo.cli.tables import show_export
    from rotationzoo.engines.export import export
    from rotationzoo.engines.import_ import Import, import_
    from rotationzoo.engines.payload import Request

    artifact = pulled.artifact or import_(
        Import(
            [pulled.path],
            default_output(entry.model, "imported"),
            model=entry.model,
            revision=revision,
        )
    )
    show_export(
        out,
        export(
            artifact,
            Request(str(to), Path("exports") / f"{Path(entry.model).name}-{entry.recipe}-{to}"),
        ),
    )


@app.command("list")
def list_(
    model: Annotated[
        str | None, typer.Argument(help="Only models with this in their name.")
    ] = None,
    recipe: Annotated[str | None, typer.Option(help="Only this recipe.")] = None,
    from_: Annotated[HubName, typer.Option("--from", help="Whose index.")] = DEFAULT_HUB,
    remote: Annotated[
        bool, typer.Option("--remote", help="Ask the hubs whether the files are there.")
    ] = False,
    index: IndexPlace = None,
    repo: ZooRepo = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show the rotations that have been published.

    rotationzoo list qwen3
    """
    out = Output(json, quiet)
    hush_libraries()
    from rotationzoo.cli.tables import show_list
    from rotationzoo.zoo.availability import check_availability

    found = _read_index(out, index, repo, str(from_))
    chosen = [
        entry
        for entry in found.content.entries
        if (model or "").lower() in entry.model.lower() and recipe in (None, entry.recipe)
    ]
    artifact = check_availability(found, chosen) if remote else None
    show_list(out, chosen, artifact)


@app.command()
def regenerate(
    model: Annotated[
        str | None, typer.Argument(help="The model to make rotations for; none with --plan.")
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Only list what is due.")] = False,
    configs: Annotated[Path, typer.Option(help="Folder of recipe files.")] = Path("configs"),
    revision: Annotated[str | None, typer.Option(help="The model's revision.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Artifact folder (rotations/MODEL-RECIPE).")
    ] = None,
    data: Annotated[str, typer.Option(help="Text to evaluate on.")] = "bundled",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to evaluate on.")] = 16384,
    length: Annotated[int, typer.Option(min=2, help="Tokens a text.")] = 2048,
    batch: Annotated[int, typer.Option(min=1, help="Rows a forward pass.")] = 4,
    to: Annotated[
        HubOrBoth | None,
        typer.Option(help="Publish to this hub."),
    ] = None,
    device: Device = "auto",
    device_map: DeviceMap = None,
    max_memory: MaxMemory = None,
    index: IndexPlace = None,
    repo: ZooRepo = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Make and publish new rotations where a model, or its recipe, has changed.

    rotationzoo regenerate --plan --json

    rotationzoo regenerate Qwen/Qwen3-8B --to huggingface --repo my-org/rotationzoo
    """
    out = Output(json, quiet)
    hush_libraries()
    from rotationzoo import recipe as recipes
    from rotationzoo.artifact.store import Artifact
    from rotationzoo.calibration.plan import Job
    from rotationzoo.cli.tables import show_due, show_regenerated
    from rotationzoo.evaluation.job import Evaluation
    from rotationzoo.zoo import due as due_models
    from rotationzoo.zoo import lookup, ownership, regenerate
    from rotationzoo.zoo.push import push as push_upload
    from rotationzoo.zoo.upload import prepare_upload

    if model is None and not plan:
        raise UsageError("name a model, or list what is due", hint="rotationzoo regenerate --plan")
    path = due_models.find_recipe_file(configs, model)
    zoo = repo or lookup.ZOO
    found = regenerate.load_published_index(
        index, zoo, DEFAULT_HUB if to in (None, "both") else str(to)
    )
    out.note(f"Read {found.origin}")
    if plan or model is None:
        due, unknown = due_models.find_due(configs, found.content)
        show_due(out, due, unknown)
        if unknown:
            name, error = next(iter(unknown.items()))
            more = f" ({len(unknown) - 1} more)" if len(unknown) > 1 else ""
            raise PartlyDone(f"whether {name} is due is not known: {error}{more}", hint=error.hint)
        return
    recipe = recipes.load(str(path))
    job = Job(
        model=model, recipe=recipe, revision=revision, batch=batch, device=device, device_map=device_map, max_memory=max_memory,
        output=named(output) or default_output(model, recipe.name),
    )  # fmt: skip
    text = recipes.override(recipes.load("oscar"), source=data, tokens=tokens, length=length).data
    with out.progress() as progress:
        verdict = regenerate.regenerate(
            job, found, Evaluation(model=model, artifacts=[], data=text), progress
        )
    done = {}
    if to is not None:
        made = Artifact.open(job.output)
        upload = prepare_upload(made, zoo)
        ownership.check_model(made)
        done = push_upload(
            upload, zoo, BOTH if to == "both" else [str(to)], create_pr=True, name=str(job.output)
        )
    show_regenerated(out, job, verdict, done)
