"""The output of `calibrate` and `import` about the artifact that they wrote."""

from rotationzoo.artifact.store import Artifact
from rotationzoo.cli.output import Output, say
from rotationzoo.codec.engines import ENGINES
from rotationzoo.model.absorbed import model_words
from rotationzoo.words import counted


def show_artifact(out: Output, artifact: Artifact, with_time: bool = True) -> None:
    """Print a summary of an artifact; `inspect` prints the full table.

    `with_time`: also print how long the calibration took, which is of interest only if it has just
    run.
    """
    manifest = artifact.manifest
    layers = counted(len(artifact.rotations), "layer")
    calibration, run = manifest.calibration, manifest.run
    tokens = calibration.tokens if calibration else 0
    data = {
        "artifact": str(artifact.folder),
        "identity": artifact.identity,
        "model": manifest.model.id,
        "revision": manifest.model.revision,
        "recipe": artifact.recipe.name,
        "layers": len(artifact.rotations),
        "tokens": tokens,
        "seconds": run.seconds,
        "peak_memory_bytes": run.peak_memory_bytes,
        "orthogonality_error": manifest.metrics.orthogonality_error,
    }
    out.notes(manifest.notes)

    def human() -> None:
        made = f"{manifest.model.id}: rotations of {layers}"
        if with_time and manifest.imported is None:
            made += f", from {counted(tokens, 'token')} in {run.seconds:.1f} s"
        say(made, f"Folder: {artifact.folder}")

    out.result(data, str(artifact.folder), human)


def suggest_evaluation(
    out: Output,
    artifact: Artifact,
    model: str,
    revision: str | None = None,
    engine: str | None = None,
) -> None:
    """Suggest to measure what the rotations cost the model, which is named as the user named it, in
    the engine that the user named."""
    words = [model, "--revision", revision] if revision else [model]
    served = ["--for", engine] if engine and ENGINES[engine].format else []
    out.suggest("evaluate", *words, str(artifact.folder), *served, "--save")


def suggest_step(out: Output, artifact: Artifact) -> None:
    """Suggest what an artifact lacks: an evaluation that it keeps, and then the report on it."""
    folder = str(artifact.folder)
    if artifact.manifest.metrics.evaluation is None:
        out.suggest("evaluate", *model_words(artifact), folder, "--save")
    else:
        out.suggest("report", folder)


def suggest_text(out: Output, artifact: Artifact, model: list[str] | None = None) -> None:
    """Suggest to write text through a cache with these rotations.

    `model`: the words that name it, by default the words of the artifact's own model.
    """
    words = model or model_words(artifact)
    prompt = [] if words == ["demo"] else ["--prompt", "TEXT"]
    out.suggest("generate", *words, "--rotations", str(artifact.folder), *prompt)
