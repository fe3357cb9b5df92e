"""`rotationzoo pull`: fetch published rotations and, if asked, export them for an engine."""

from pathlib import Path

from rotationzoo.cli.next_steps import suggest_text
from rotationzoo.cli.output import Output, say
from rotationzoo.cli.progress_bar import show_progress
from rotationzoo.codec.engine_needs import ENGINES, PullEngineName
from rotationzoo.settings import Import, IndexPlace, Signatures, ZooRepo
from rotationzoo.settings_base import argument, option
from rotationzoo.storage.folders import follow_link
from rotationzoo.zoo.hubs.protocol import HubOrAny, chosen_hubs


def pull_command(
    signatures: Signatures,
    out: Output,
    model: str = argument("The model whose rotations to fetch, such as Qwen/Qwen3-8B."),
    from_: HubOrAny = option("The hub to fetch from.", "--from", default="any"),
    revision: str | None = option("Only rotations for this revision of the model."),
    recipe: str | None = option("Only rotations of this recipe."),
    rope_scaling: str | None = option("Only rotations for this scaling (none), such as yarn:4."),
    local_dir: Path | None = option("Where to put them (the cache)."),
    to: PullEngineName | None = option("Also export them for this engine.", "--for", "--to"),
    index: IndexPlace = None,
    repo: ZooRepo = None,
) -> None:
    """Fetch published rotations, with every hash checked.

    rotationzoo pull Qwen/Qwen3-8B --for sglang
    """
    from rotationzoo.zoo.lookup import choose_entry, find_index
    from rotationzoo.zoo.pull import pull_first
    from rotationzoo.zoo.signed_index import check_index
    from rotationzoo.zoo.signing import make_demand

    demand = make_demand(signatures)
    hubs = chosen_hubs(from_, repo)
    # The first hub has the index, even if the files may come from any.
    zoo_index = find_index(index, repo, hubs[0])
    out.note(f"Read {zoo_index.origin}")
    if finding := check_index(zoo_index, demand):
        out.notes([finding.note])
    entry, copies, why = choose_entry(zoo_index, model, revision, recipe, hubs, rope_scaling, to)
    with show_progress(out) as progress:
        pulled = pull_first(zoo_index, entry, copies, follow_link(local_dir), progress, demand)
    out.note(f"Took {why}, from {pulled.copy.repo} on {pulled.copy.hub}")
    if pulled.signature is not None:
        out.notes([pulled.signature.note])
    if to is None:
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
            out.note("Note: these are OSCAR's own files; import makes an artifact from them")
            out.suggest("import", str(pulled.path), "--model", entry.model)
        else:
            suggest_text(out, pulled.artifact.folder, [entry.model])
        return
    from rotationzoo.artifact.reductions import Request
    from rotationzoo.cli.export import show_export
    from rotationzoo.engines.export import export

    artifact = pulled.artifact
    if artifact is None:  # OSCAR's own files
        from rotationzoo.engines.import_ import import_
        from rotationzoo.storage.folders import default_output

        folder = default_output(entry.model, "imported")
        artifact = import_(Import([pulled.path], folder, model=entry.model, revision=revision))
    target = Path("exports", f"{Path(entry.model).name}-{entry.recipe}-{to}")
    request = Request(str(to), None if ENGINES[to].command else target)
    show_export(out, export(artifact, request))
