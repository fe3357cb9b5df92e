"""Commands about the files of serving engines: export, import. What is slow to import is imported
inside."""

from pathlib import Path
from typing import Annotated

import typer

from rotationzoo.cli.options import (
    ArtifactFolder,
    Json,
    Quiet,
    Revision,
    app,
    default_output,
    named,
    parse_windows,
)
from rotationzoo.cli.output import Output, hush_libraries
from rotationzoo.engines.registry import EngineName
from rotationzoo.errors import UsageError

Clip = Annotated[
    str | None,
    typer.Option("--clip", help="Clip ratios of keys and values, as 0.96/0.92, or one for both."),
]
Windows = Annotated[
    str | None, typer.Option("--windows", help="Sink and recent tokens kept exact, as 64/256.")
]


@app.command()
def export(
    artifact: ArtifactFolder,
    to: Annotated[
        EngineName | None,
        typer.Option("--to", help="The engine."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder (exports/ARTIFACT-ENGINE).")
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
        Path | None, typer.Option(help="llama.cpp: the GGUF file that a copy is made of.")
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
    absorb_values: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="Write this model with the value rotation in its weights."
        ),
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
    if (to is None) == (absorb_values is None):
        raise UsageError(
            "export writes for one engine, or a model that carries the value rotation",
            hint="--to sglang",
        )
    from rotationzoo.artifact.store import Artifact
    from rotationzoo.cli.tables import show_absorbed, show_export

    opened = Artifact.open(artifact)
    if absorb_values is not None:
        if (
            pooled
            or uncentered
            or clip
            or windows
            or base
            or model
            or engine_hadamard
            or values_absorbed
        ):
            raise UsageError(
                "--absorb-values goes with --output alone", hint="give the other options with --to"
            )
        hush_libraries()
        from rotationzoo.engines.absorb import absorb

        target = named(output) or Path("exports") / f"{artifact.resolve().name}-absorbed"
        with out.progress() as progress:
            show_absorbed(out, absorb(opened, absorb_values, target, progress), artifact)
        return
    from rotationzoo.engines.base import Options
    from rotationzoo.engines.export import export as write
    from rotationzoo.engines.payload import Request

    request = Request(
        engine=str(to),
        output=named(output),
        pooled=pooled,
        uncentered=uncentered,
        clip=_ratios(clip),
        windows=_windows(windows),
        values_absorbed=values_absorbed,
        options=Options(base, engine_hadamard, model),
    )
    if to != "llama.cpp" and (base or engine_hadamard or model):
        raise UsageError(
            "--base, --model and --engine-hadamard are for llama.cpp", hint="--to llama.cpp"
        )
    show_export(out, write(opened, request))


@app.command("import")
def import_(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="The two rotation files, their folder, or a GGUF file.", metavar="FILES"
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Artifact folder (rotations/NAME-imported)."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The model that they are for: a hub id or a folder.")
    ] = None,
    revision: Revision = None,
    clip: Clip = None,
    windows: Windows = None,
    group_size: Annotated[
        int | None, typer.Option(min=1, help="Channels that share a scale (the whole head).")
    ] = None,
    transposed: Annotated[
        bool, typer.Option("--transposed", help="They hold the matrices transposed.")
    ] = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="Replace an artifact that is there.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Make an artifact of rotations that others published: .pt files of OSCAR's servers, MLX's
    safetensors, GGUF.

    rotationzoo import k_rotation_qqt_r_h_pbr.pt v_rotation_sst_r_h_pbr.pt --model
    Qwen/Qwen3-4B-Thinking-2507
    """
    out = Output(json, quiet)
    hush_libraries()
    from rotationzoo.cli.tables import show_artifact
    from rotationzoo.engines.import_ import Import
    from rotationzoo.engines.import_ import import_ as read

    first = files[0].expanduser().resolve()
    name = model or (first if first.is_dir() else first.parent).name or "rotations"
    job = Import(
        files=files,
        output=named(output) or default_output(name, "imported"),
        model=model,
        revision=revision,
        clip=_ratios(clip),
        windows=_windows(windows),
        group_size=group_size,
        transposed=transposed,
        restart=restart,
    )
    made = read(job)
    assert made.manifest.imported is not None
    for note in made.manifest.imported.notes:
        out.note(f"Note: {note}")
    if not made.bound:
        out.note("Note: bound to no model; --model MODEL says which one the files are for")
    show_artifact(out, made, model)


def _ratios(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    parts = text.split("/")
    try:
        ratios = [float(part) for part in parts]
    except ValueError:
        ratios = []
    if len(ratios) not in (1, 2) or not all(0 < ratio <= 1 for ratio in ratios):
        raise UsageError(
            f"--clip {text} is no clip ratio above 0 and at most 1",
            hint="write it as: --clip 0.96/0.92",
        )
    return ratios[0], ratios[-1]


def _windows(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    windows = parse_windows(text)
    if len(windows) != 1:
        raise UsageError(
            f"--windows {text} is not one pair of sink/recent", hint="write it as: --windows 64/256"
        )
    return windows[0]
