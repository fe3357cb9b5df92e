"""`rotationzoo pull`: fetch published rotations and, if asked, export them for an engine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rotationzoo.cli import options
from rotationzoo.cli.library_logs import hush_libraries
from rotationzoo.cli.output import Output, say
from rotationzoo.cli.progress_bar import show_progress
from rotationzoo.codec.engines import ENGINES, PullEngineName

if TYPE_CHECKING:
    from rotationzoo.artifact.store import Artifact
    from rotationzoo.zoo.pull import Pulled


def pull_command(
    model: Annotated[
        str, typer.Argument(help="The model whose rotations to fetch, such as Qwen/Qwen3-8B.")
    ],
    from_: Annotated[options.HubOrAny, typer.Option("--from", help="Which hub.")] = "any",
    revision: Annotated[
        str | None, typer.Option(help="The model's revision that they should be made for.")
    ] = None,
    recipe: Annotated[str | None, typer.Option(help="Only rotations of this recipe.")] = None,
    rope_scaling: Annotated[
        str | None,
        typer.Option(help="Only rotations for this scaling, such as yarn:4; by default none."),
    ] = None,
    local_dir: Annotated[
        Path | None, typer.Option(help="Put them here and not into the cache.")
    ] = None,
    to: Annotated[
        PullEngineName | None,
        typer.Option("--for", "--to", help="Also export them for this engine"),
    ] = None,
    index: options.IndexPlace = None,
    repo: options.ZooRepo = None,
    signers: options.Signers = None,
    issuer: options.Issuer = None,
    require_signature: options.RequireSignature = False,
    trust_config: options.TrustConfig = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Fetch published rotations, with every hash checked.

    rotationzoo pull Qwen/Qwen3-8B --for sglang
    """
    out = Output(json, quiet)
    hush_libraries(models=to is not None)
    from rotationzoo.zoo.lookup import choose_entry, find_index
    from rotationzoo.zoo.pull import pull_first
    from rotationzoo.zoo.signed_index import check_index
    from rotationzoo.zoo.signing.verify import SignatureOptions, make_demand

    demand = make_demand(**options.chosen(locals(), SignatureOptions))
    hubs = options.chosen_hubs(from_)
    # The index is that of the first hub, even if the files may come from any.
    zoo_index = find_index(index, repo, hubs[0])
    out.note(f"Read {zoo_index.origin}")
    if finding := check_index(zoo_index, demand):
        out.notes([finding.note])
    entry, copies, why = choose_entry(zoo_index, model, revision, recipe, hubs, rope_scaling)
    with show_progress(out) as progress:
        pulled = pull_first(
            zoo_index, entry, copies, options.follow_link(local_dir), progress, demand
        )
    out.note(f"Took {why}, from {pulled.copy.repo} on {pulled.copy.hub}")
    if pulled.signature is not None:
        out.notes([pulled.signature.note])
    if to is None:
        show_pull(out, pulled)
        return
    from rotationzoo.cli.export_view import show_export
    from rotationzoo.engines.export import export
    from rotationzoo.engines.payload import Request

    artifact = pulled.artifact or _import(pulled, revision)
    target = None
    if not ENGINES[to].command:
        target = Path("exports") / f"{Path(entry.model).name}-{entry.recipe}-{to}"
    show_export(out, export(artifact, Request(str(to), target)))


def _import(pulled: "Pulled", revision: str | None) -> "Artifact":
    """Make an artifact of OSCAR's own files."""
    from rotationzoo.engines.import_ import Import, import_
    from rotationzoo.storage.folders import default_output

    model = pulled.entry.model
    output = default_output(model, "imported")
    return import_(Import([pulled.path], output, model=model, revision=revision))


def show_pull(out: Output, pulled: "Pulled") -> None:
    """Print where the files are and, for OSCAR's own files, how to make an artifact of them."""
    entry = pulled.entry
    from rotationzoo.cli.artifact_view import suggest_text

    out.notes(pulled.notes)
    data = {
        "path": str(pulled.path),
        "repo": pulled.copy.repo,
        "hub": pulled.copy.hub,
        "revision": pulled.revision,
        "model": entry.model,
        "recipe": entry.recipe,
        "format": entry.format,
        "files": pulled.files,
        "notes": pulled.notes,
        "signature": pulled.signature and pulled.signature.summary(),
    }
    out.result(data, str(pulled.path), lambda: say(str(pulled.path)))
    if pulled.artifact is None:
        out.note("Note: these are OSCAR's own files; import makes an artifact of them")
        out.suggest("import", str(pulled.path), "--model", entry.model)
    else:
        suggest_text(out, pulled.artifact, [entry.model])
