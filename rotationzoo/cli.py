"""The commands. Each is short; what is slow to import is imported inside."""

import os
import shlex
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rotationzoo.console import Output, hush_libraries, report, table
from rotationzoo.errors import Interrupted, RotationZooError

if TYPE_CHECKING:
    from rotationzoo.artifact import Artifact
    from rotationzoo.plan import Job, Plan
    from rotationzoo.summary import LayerSummary


class _Commands(typer.core.TyperGroup):
    """Turns a known failure of any command into two lines and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except RotationZooError as error:
            if os.environ.get("ROTATIONZOO_DEBUG") == "1":
                raise
            report(error)
            raise typer.Exit(error.exit_code) from error
        except KeyboardInterrupt as error:
            report(Interrupted("interrupted"))
            raise typer.Exit(Interrupted.exit_code) from error


app = typer.Typer(
    cls=_Commands, no_args_is_help=True, pretty_exceptions_enable=False,
    help="Rotations for 2-bit KV caches: calibrate, inspect, verify.",
)  # fmt: skip

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print names only.")]
ArtifactFolder = Annotated[Path, typer.Argument(help="The folder that calibrate wrote.", metavar="ARTIFACT")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")]


@app.callback()
def main() -> None:
    """Run with ROTATIONZOO_DEBUG=1 for tracebacks."""


@app.command()
def calibrate(
    model: Annotated[str, typer.Argument(help="A hub id, a local folder, or demo: a small model that ships with this.")],
    recipe: Annotated[str, typer.Option(help="oscar, oscar-v1, hadamard, identity, random, or a YAML file.")] = "oscar",
    data: Annotated[str | None, typer.Option(help="Data set id, .jsonl, .txt or .parquet file, or bundled.")] = None,
    subset: Annotated[str | None, typer.Option(help="The data set's configuration.")] = None,
    split: Annotated[str | None, typer.Option(help="The data set's split (train).")] = None,
    column: Annotated[str | None, typer.Option(help="Column of the text or of the chat messages.")] = None,
    packing: Annotated[str | None, typer.Option(help="packed rows of equal length, or one document a row.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens in all (32768).")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens a row (2048).")] = None,
    seed: Annotated[int | None, typer.Option(help="Order of the documents (0).")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Rows a forward pass (4; 16 with a device map).")] = None,
    output: Annotated[Path | None, typer.Option(help="Artifact folder (rotations/MODEL-RECIPE).")] = None,
    revision: Revision = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where to run.")] = "auto",
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32"], typer.Option(help="auto: the model's own, float32 on a CPU.")
    ] = "auto",
    device_map: Annotated[str | None, typer.Option(help="auto: spread over GPUs, main memory and disk.")] = None,
    max_memory: Annotated[str | None, typer.Option(help="Limits for the device map: 0=20GiB,cpu=60GiB.")] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Drop a checkpoint and replace an artifact.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done; read only the config.")] = False,
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
        recipes.load(recipe), source=data, subset=subset, split=split, column=column, packing=packing,
        tokens=tokens, length=length, seed=seed,
    )  # fmt: skip
    from rotationzoo.calibrate import calibrate as run
    from rotationzoo.plan import Job
    from rotationzoo.plan import plan as look

    job = Job(
        model=model,
        recipe=chosen,
        output=output.resolve() if output and output.is_symlink() else output or _default_output(model, chosen.name),
        revision=revision,
        batch=batch or (16 if device_map else 4),
        device=device,
        dtype=dtype,
        device_map=device_map,
        max_memory=max_memory,
        restart=restart,
    )
    if chosen.model not in (None, model):
        out.note(f"Note: this recipe is meant for {chosen.model}")
    if dry_run:
        _show_plan(out, job, look(job))
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a scheduler's kill is an interruption too
    try:
        with out.progress() as progress:
            artifact = run(job, progress)
    except KeyboardInterrupt:
        saved = job.checkpoint.is_file()
        words = [word for word in sys.argv[1:] if not saved or word != "--restart"]  # which would drop what was saved
        command = shlex.join(["rotationzoo", *words])
        raise Interrupted(
            "interrupted; the statistics so far are saved" if saved else "interrupted before anything was saved",
            hint=f"go on with: {command}" if saved else f"start again with: {command}",
        ) from None
    _show_artifact(out, artifact)


@app.command()
def inspect(artifact: ArtifactFolder, json: Json = False, quiet: Quiet = False) -> None:
    """Show what each layer's statistics look like."""
    from rotationzoo.artifact import Artifact
    from rotationzoo.summary import summarize

    opened = Artifact.open(artifact)
    layers = summarize(opened)
    data = {
        "artifact": str(artifact), "identity": opened.identity, "model": opened.manifest["model"]["id"],
        "recipe": opened.manifest["recipe"]["name"], "layers": [asdict(layer) for layer in layers],
    }  # fmt: skip
    Output(json, quiet).result(data, opened.identity, lambda: _layer_table(opened, layers))


@app.command()
def verify(
    artifact: ArtifactFolder,
    model: Annotated[str | None, typer.Option(help="Also check that it was made for this model.")] = None,
    revision: Revision = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check that an artifact is whole, orthogonal and of its model."""
    from rotationzoo.artifact import Artifact
    from rotationzoo.verify import verify as check

    opened = Artifact.open(artifact)
    hush_libraries()
    found = check(opened, model, revision)

    def human() -> None:
        for problem in found.problems:
            print(f"Problem: {problem}")
        if found.ok:
            print(f"{artifact} is sound (largest |R R^T - I| {found.orthogonality_error:.1e})")
        print(f"Checked: {', '.join(found.checked)}")

    data = {"ok": found.ok, "problems": found.problems, "orthogonality_error": found.orthogonality_error}
    Output(json, quiet).result(data, opened.identity if found.ok else "", human)
    if not found.ok:
        raise RotationZooError(
            f"{artifact} is not to be used: {len(found.problems)} problem{'s' * (len(found.problems) > 1)} found",
            hint="fetch it again, or make it again with rotationzoo calibrate; its card says from what model, recipe and text",
        )


def _default_output(model: str, recipe: str) -> Path:
    """`rotations/MODEL-RECIPE`, by the folder's own name where the model is a path such as `.`."""
    path = Path(model)
    return Path("rotations") / f"{(path.resolve() if path.is_dir() else path).name}-{recipe}"


def _show_artifact(out: Output, artifact: "Artifact") -> None:
    from rotationzoo.summary import summarize

    manifest = artifact.manifest
    layers = summarize(artifact)
    calibration = manifest["calibration"] or {"tokens": 0, "note": None}
    data = {
        "artifact": str(artifact.folder),
        "identity": artifact.identity,
        "model": manifest["model"]["id"],
        "revision": manifest["model"]["revision"],
        "recipe": manifest["recipe"]["name"],
        "layers": len(layers),
        "tokens": calibration["tokens"],
        "seconds": manifest["run"]["seconds"],
        "peak_memory_bytes": manifest["run"]["peak_memory_bytes"],
        "orthogonality_error": manifest["metrics"]["orthogonality_error"],
    }
    if calibration["note"]:
        out.note(f"Note: {calibration['note']}")

    def human() -> None:
        _layer_table(artifact, layers)
        print(f"{calibration['tokens']:,} tokens in {manifest['run']['seconds']:.1f} s")
        print(f"Artifact: {artifact.folder}")

    out.result(data, str(artifact.folder), human)


def _layer_table(artifact: "Artifact", layers: "list[LayerSummary]") -> None:
    """Keys and values side by side, no wider than a terminal."""
    columns = ["layer", "heads", *(word for side in "KV" for word in (f"{side} dim", "rank", "top1", "top8")), "error"]
    rows = []
    for layer in layers:
        row = [str(layer.layer), str(layer.kv_heads)]
        for side in (layer.key, layer.value):
            row += [str(side.dim), f"{side.effective_rank:.1f}", f"{side.top_1_share:.1%}", f"{side.top_8_share:.1%}"]
        rows.append([*row, f"{max(layer.key.orthogonality_error, layer.value.orthogonality_error):.0e}"])
    table(f"{artifact.manifest['model']['id']}, recipe {artifact.manifest['recipe']['name']}", columns, rows)
    print("rank: effective rank of the statistic; top1, top8: share of its strongest directions; error: |R R^T - I|")


def _show_plan(out: Output, job: "Job", plan: "Plan") -> None:
    from rotationzoo.geometry import cached_layers, geometry_json

    cached = cached_layers(plan.geometry or [])

    def common(values: list[Any]) -> Any:
        """The one value that all layers share, or the list of them."""
        return values[0] if len(set(values)) == 1 else values

    data = {
        "model": plan.source.name,
        "revision": plan.source.revision,
        "recipe": job.recipe.name,
        "layers": len(cached),
        "kv_heads": common([layer.kv_heads for layer in cached]),
        "head_dim": common([layer.key_dim for layer in cached]),
        "value_head_dim": common([layer.value_dim for layer in cached]),
        "tokens": job.recipe.data.tokens if job.recipe.needs_statistics else 0,
        "weights_bytes": plan.weights_bytes,
        "peak_memory_bytes": plan.peak_memory_bytes,
        "artifact_bytes": plan.artifact_bytes,
        "refusal": str(plan.refusal) if plan.refusal else None,
        "output": str(job.output),
        "geometry": geometry_json(plan.geometry or []),
    }

    def human() -> None:
        if plan.refusal:
            print(f"{plan.source.name} cannot be calibrated: {plan.refusal}")
            return
        if plan.geometry is None:
            print(f"{plan.source.name}: what its layers cache shows only with its weights")
        else:
            print(f"{plan.source.name}: {data['layers']} layers with a cache, KV heads {data['kv_heads']}, ", end="")
            print(f"head dimension {data['head_dim']}")
        print(f"Weights {_size(plan.weights_bytes)}, peak memory about {_size(plan.peak_memory_bytes)}, ", end="")
        print(f"artifact {_size(plan.artifact_bytes)}, {data['tokens']:,} tokens")
        print(f"Would write: {job.output}")

    out.result(data, str(job.output), human)


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
