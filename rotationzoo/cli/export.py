"""`rotationzoo export`: write the files that a serving engine reads."""

from pathlib import Path
from typing import Annotated

import typer

from rotationzoo.cli.library_logs import hush_libraries
from rotationzoo.cli.options import (
    ArtifactFolder,
    Clip,
    Json,
    Quiet,
    Windows,
    follow_link,
    parse_clip,
    parse_window,
)
from rotationzoo.cli.output import Output
from rotationzoo.cli.progress_bar import show_progress
from rotationzoo.engines.registry import EngineName
from rotationzoo.errors import UsageError


def export_command(
    artifact: ArtifactFolder,
    to: Annotated[EngineName | None, typer.Option("--to", help="The engine.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder (ARTIFACT-ENGINE in exports).")
    ] = None,
    pooled: Annotated[
        bool,
        typer.Option("--pooled", help="One rotation per layer, fitted from the pooled statistics."),
    ] = False,
    uncentered: Annotated[
        bool, typer.Option("--uncentered", help="Leave the means of keys and values out.")
    ] = False,
    clip: Clip = None,
    windows: Windows = None,
    base: Annotated[
        Path | None, typer.Option(help="llama.cpp: the GGUF file that is copied and added to.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="llama.cpp: the model that the base was converted from, to compare them."
        ),
    ] = None,
    engine_hadamard: Annotated[
        bool,
        typer.Option(
            "--engine-hadamard",
            help="llama.cpp: leave the last Hadamard transform to the engine's own.",
        ),
    ] = False,
    values_absorbed: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Serve this model, whose weights carry the value rotation already.",
        ),
    ] = None,
    folded: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Serve this model, whose weights carry the artifact's equalizers already.",
        ),
    ] = None,
    absorb_values: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="Write this model with the value rotation in its weights."
        ),
    ] = None,
    absorb: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Write this model with the equalizers in its weights."),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write the files that a serving engine reads, and print how to start it.

    rotationzoo export rotations/Qwen3-8B-oscar --to sglang

    rotationzoo export rotations/Qwen3-8B-oscar --to llama.cpp --base Qwen3-8B-Q8_0.gguf --pooled
    --clip 0.96

    rotationzoo export rotations/Qwen3-8B-oscar --absorb-values Qwen/Qwen3-8B -o Qwen3-8B-absorbed
    """
    out = Output(json, quiet)
    if [to, absorb_values, absorb].count(None) != 2:
        raise UsageError(
            "export writes for one engine, or one model that carries a part of the artifact",
            hint="--to sglang",
        )
    if values_absorbed and folded:
        raise UsageError(
            "--values-absorbed and --folded name two models to serve", hint="give one of them"
        )
    from rotationzoo.artifact.store import Artifact
    from rotationzoo.cli.export_view import (
        show_changed_model,
        show_export,
        suggest_measuring,
    )

    opened = Artifact.open(artifact)
    for_llama_cpp = bool(base or engine_hadamard or model)
    if to is None:
        for_engines = pooled or uncentered or clip or windows or values_absorbed or folded
        if for_engines or for_llama_cpp:
            raise UsageError(
                "--absorb and --absorb-values go with --output alone",
                hint="give the other options with --to",
            )
        hush_libraries()
        from rotationzoo.engines import absorb as absorbing
        from rotationzoo.storage.folders import check_writable

        ending = "absorbed" if absorb is None else "folded"
        target = follow_link(output) or Path("exports") / f"{artifact.resolve().name}-{ending}"
        check_writable(target)  # before the weights are fetched
        with show_progress(out) as progress:
            if absorb is not None:
                absorbing.fold(opened, absorb, target, progress)
            else:
                absorbing.absorb(opened, str(absorb_values), target, progress)
        show_changed_model(out, target, artifact, folded=absorb is not None)
        return
    from rotationzoo.engines.base import Options
    from rotationzoo.engines.export import export
    from rotationzoo.engines.payload import Request

    request = Request(
        engine=str(to),
        output=follow_link(output),
        pooled=pooled,
        uncentered=uncentered,
        clip=parse_clip(clip),
        windows=parse_window(windows),
        values_absorbed=values_absorbed,
        folded=folded,
        options=Options(base, engine_hadamard, model),
    )
    if to != "llama.cpp" and for_llama_cpp:
        raise UsageError(
            "--base, --model and --engine-hadamard are for llama.cpp", hint="--to llama.cpp"
        )
    show_export(out, export(opened, request))
    suggest_measuring(out, opened, str(to))
