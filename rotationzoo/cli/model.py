"""Commands about one model: calibrate, evaluate, validate, inspect, verify. What is slow to import
is imported inside."""

import shlex
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from rotationzoo.cli.options import (
    ArtifactFolder,
    Device,
    DeviceMap,
    Dtype,
    Json,
    MaxMemory,
    PrefillChunk,
    PrefillLayout,
    Quiet,
    Revision,
    app,
    default_output,
    named,
    parse_layers,
    parse_windows,
)
from rotationzoo.cli.output import Output, hush_libraries, say
from rotationzoo.errors import Interrupted, RotationZooError, UsageError


@app.command()
def calibrate(
    model: Annotated[
        str,
        typer.Argument(
            help="A hub id, a local folder, or demo: a small model that ships with this."
        ),
    ],
    recipe: Annotated[
        str,
        typer.Option(
            help="oscar, best, best-uncentered, oscar-v1, hadamard, identity, random, or a YAML file."
        ),
    ] = "oscar",
    data: Annotated[
        str | None,
        typer.Option(
            help="Data set id, .jsonl, .txt or .parquet file, bundled, or self: text of the model's own."
        ),
    ] = None,
    prompts: Annotated[
        str | None, typer.Option(help="What the model goes on from with --data self (bundled).")
    ] = None,
    subset: Annotated[str | None, typer.Option(help="The data set's configuration.")] = None,
    split: Annotated[str | None, typer.Option(help="The data set's split (train).")] = None,
    column: Annotated[
        str | None, typer.Option(help="Column of the text or of the chat messages.")
    ] = None,
    packing: Annotated[
        str | None,
        typer.Option(help="packed rows, mixed with rows half as long, or a document a row."),
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens in all (32768; best: 262144).")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens a row (2048; best: 4096).")] = None,
    seed: Annotated[int | None, typer.Option(help="Order of the documents (0).")] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Rows a forward pass (4; 16 with a device map).")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Artifact folder (rotations/MODEL-RECIPE)."),
    ] = None,
    revision: Revision = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    device_map: DeviceMap = None,
    max_memory: MaxMemory = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Drop a checkpoint and replace an artifact.")
    ] = False,
    budget: Annotated[
        float | None, typer.Option(min=0, help="Minutes for the search of recipes such as best.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done; read only the config.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compute the rotations of a causal language model.

    rotationzoo calibrate demo

    rotationzoo calibrate Qwen/Qwen3-8B --recipe configs/Qwen3-8B.yaml

    rotationzoo calibrate ./my-model --data my-texts.jsonl --tokens 65536
    """
    out = Output(json, quiet)
    from rotationzoo import recipe as recipes

    hush_libraries()
    chosen = recipes.override(
        recipes.load(recipe), source=data, prompts=prompts, subset=subset, split=split, column=column, packing=packing,
        tokens=tokens, length=length, seed=seed,
    )  # fmt: skip
    from rotationzoo.calibration.job import calibrate as run
    from rotationzoo.calibration.plan import Job
    from rotationzoo.cli.plan_view import show_plan
    from rotationzoo.cli.tables import show_artifact

    job = Job(
        model=model, recipe=chosen, output=named(output) or default_output(model, chosen.name),
        revision=revision, batch=batch or (16 if device_map else 4), device=device, dtype=dtype,
        device_map=device_map, max_memory=max_memory, restart=restart, budget=budget,
        fit_length=length is None and recipe in recipes.PRESETS,
    )  # fmt: skip
    if budget is not None and chosen.search is None:
        raise UsageError(
            f"--budget is for recipes that search, and {chosen.name} does not", hint="--recipe best"
        )
    if chosen.model not in (None, model):
        out.note(f"Note: this recipe is meant for {chosen.model}")
    if dry_run:
        show_plan(out, job)
        return
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # a scheduler's kill is an interruption too
    before = job.output.stat().st_ctime_ns if job.output.exists() else None
    try:
        with out.progress() as progress:
            artifact = run(job, progress)
    except KeyboardInterrupt:
        saved = job.unfinished
        words = [
            word for word in sys.argv[1:] if not saved or word != "--restart"
        ]  # which would drop what was saved
        command = shlex.join(["rotationzoo", *words])
        raise Interrupted(
            "interrupted; what was done so far is saved"
            if saved
            else "interrupted before anything was saved",
            hint=f"go on with: {command}" if saved else f"start again with: {command}",
        ) from None
    done_before = job.output.stat().st_ctime_ns == before
    if done_before:
        out.note("Note: this very job was done already; --restart does it again")
    show_artifact(out, artifact, next_for=model, with_time=not done_before)


@app.command()
def evaluate(
    model: Annotated[str, typer.Argument(help="A hub id, a local folder, or demo.")],
    artifacts: Annotated[
        list[Path] | None, typer.Argument(help="Artifact folders.", metavar="ARTIFACT")
    ] = None,
    data: Annotated[
        str,
        typer.Option(help="Data set id, .jsonl, .txt or .parquet file; bundled is held-out text."),
    ] = "bundled",
    subset: Annotated[str | None, typer.Option(help="The data set's configuration.")] = None,
    split: Annotated[str | None, typer.Option(help="The data set's split (train).")] = None,
    column: Annotated[
        str | None, typer.Option(help="Column of the text or of the chat messages.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens in all.")] = 16384,
    length: Annotated[int, typer.Option(min=2, help="Tokens a text.")] = 2048,
    seed: Annotated[int, typer.Option(help="Order of the documents.")] = 0,
    windows: Annotated[
        str | None, typer.Option(help="Sink/recent tokens kept exact, several with commas.")
    ] = None,
    format: Annotated[
        Literal["sglang", "sglang-bisected", "vllm", "mlx"],
        typer.Option(help="The engine's 2-bit format."),
    ] = "sglang",
    layers: Annotated[
        str | None, typer.Option(help="Only these layers in 2 bits, as 0,4-7.")
    ] = None,
    keys_only: Annotated[bool, typer.Option("--keys-only", help="Leave the values exact.")] = False,
    values_only: Annotated[
        bool, typer.Option("--values-only", help="Leave the keys exact.")
    ] = False,
    prefill_chunk: PrefillChunk = None,
    prefill_layout: PrefillLayout = None,
    queries: Annotated[
        int, typer.Option(min=0, help="Sampled queries a text for the attention KL; 0: none.")
    ] = 32,
    batch: Annotated[int, typer.Option(min=1, help="Texts a forward pass.")] = 1,
    save: Annotated[
        bool, typer.Option("--save", help="Add evaluation.json to each artifact.")
    ] = False,
    revision: Revision = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    device_map: DeviceMap = None,
    max_memory: MaxMemory = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure what rotations cost a model whose cache is stored in 2 bits.

    rotationzoo evaluate demo rotations/demo-oscar

    rotationzoo evaluate Qwen/Qwen3-8B rotations/Qwen3-8B-oscar --data my-texts.jsonl --windows
    64/256,128/1024 --save
    """
    out = Output(json, quiet)
    if keys_only and values_only:
        raise UsageError(
            "--keys-only and --values-only leave nothing to store in 2 bits",
            hint="give one of them",
        )
    from rotationzoo import recipe as recipes
    from rotationzoo.cli.evaluation_table import show_evaluation
    from rotationzoo.evaluation import job as evaluation

    hush_libraries()
    data_settings = recipes.override(
        recipes.load("oscar"),
        source=data,
        subset=subset,
        split=split,
        column=column,
        tokens=tokens,
        length=length,
        seed=seed,
    ).data
    job = evaluation.Evaluation(
        model=model,
        artifacts=artifacts or [],
        data=data_settings,
        windows=parse_windows(windows),
        format=format,
        layers=parse_layers(layers),
        sides=("key",) if keys_only else ("value",) if values_only else ("key", "value"),
        prefill_chunk=prefill_chunk,
        prefill_layout=prefill_layout,
        queries=queries,
        revision=revision,
        batch=batch,
        device=device,
        dtype=dtype,
        device_map=device_map,
        max_memory=max_memory,
        save_to=(artifacts or []) if save else [],
    )
    with out.progress() as progress:
        report_ = evaluation.evaluate(job, progress)
    show_evaluation(out, report_)


@app.command()
def validate(
    artifact: ArtifactFolder,
    model: Annotated[
        str | None, typer.Option(help="Also validate on keys and values captured from this model.")
    ] = None,
    rows: Annotated[
        int, typer.Option(min=64, help="Rows for each layer, KV head and side.")
    ] = 1024,
    device: Device = "auto",
    revision: Revision = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check on a GPU that the CUDA reference stores what the codec defines, bit by bit, and measure
    its speed.

    rotationzoo validate rotations/demo-oscar
    """
    out = Output(json, quiet)
    from rotationzoo.artifact.store import Artifact
    from rotationzoo.checks import kernel as validation
    from rotationzoo.cli.tables import show_validation

    hush_libraries()
    opened = Artifact.open(artifact)
    validation.check_device(artifact, device)
    with out.progress() as progress:
        settings = validation.Validation(rows, model, revision, device)
        found = validation.validate_kernel(opened, settings, progress)
    show_validation(out, opened, found)


@app.command()
def inspect(artifact: ArtifactFolder, json: Json = False, quiet: Quiet = False) -> None:
    """Show what each layer's statistics look like."""
    from rotationzoo.artifact.spectra import summarize
    from rotationzoo.artifact.store import Artifact
    from rotationzoo.cli.tables import layer_table

    opened = Artifact.open(artifact)
    layers = summarize(opened)
    data = {
        "artifact": str(artifact), "identity": opened.identity, "model": opened.manifest.model.id,
        "recipe": opened.recipe.name, "layers": [asdict(layer) for layer in layers],
    }  # fmt: skip
    Output(json, quiet).result(data, opened.identity, lambda: layer_table(opened, layers))


@app.command()
def report(artifact: ArtifactFolder, json: Json = False, quiet: Quiet = False) -> None:
    """Add pictures of the spectra and of the error by layer to an artifact and its card."""
    from rotationzoo.artifact.plots import report as draw
    from rotationzoo.artifact.store import Artifact

    drawn = draw(Artifact.open(artifact))
    pictures = [str(artifact / name) for name in drawn.manifest.files if name.endswith(".png")]
    Output(json, quiet).result({"pictures": pictures}, "\n".join(pictures), lambda: say(*pictures))


@app.command()
def verify(
    artifact: ArtifactFolder,
    model: Annotated[
        str | None, typer.Option(help="Also check that it was made for this model.")
    ] = None,
    run: Annotated[
        bool,
        typer.Option(
            "--run", help="Also run the model, and look for the rotations in what it computes."
        ),
    ] = False,
    revision: Revision = None,
    device: Device = "auto",
    device_map: DeviceMap = None,
    max_memory: MaxMemory = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check that an artifact is whole, orthogonal and of its model."""
    out = Output(json, quiet)
    if run and model is None:
        raise UsageError("--run needs a model", hint="add: --model MODEL")
    from rotationzoo.artifact.store import Artifact
    from rotationzoo.checks.verify import verify as check
    from rotationzoo.cli.tables import show_verification

    opened = Artifact.open(artifact)
    hush_libraries()
    found = check(opened, model, revision)
    agreement = None
    if run and model is not None and found.orthogonality_error is not None:
        from rotationzoo.checks.membership import Candidate, check_membership

        with out.progress() as progress:
            candidate = Candidate(model, revision, device, device_map, max_memory)
            agreement = check_membership(opened, candidate, progress)
        if agreement.foreign:
            found.problems.append(
                f"not made of what {model} computes (agreement {agreement.lowest:.2f} of 1)"
            )

    show_verification(out, opened, found, agreement)
    if not found.ok:
        raise RotationZooError(
            f"{artifact} is not to be used: {len(found.problems)} problem{'s' * (len(found.problems) > 1)} found",
            hint="import its files again with --model MODEL"
            if not opened.bound
            else "fetch it again, or make it again with rotationzoo calibrate; its card says from what model, recipe and text",
        )
