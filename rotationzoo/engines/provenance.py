"""Provenance: what an engine's files state about the origin of their rotations."""

from rotationzoo.artifact.store import Artifact
from rotationzoo.storage.files import digest

Provenance = dict[str, str | int | float | bool]
"""Only primitives, so that a `.pt` file loads without running code."""


def provenance(
    artifact: Artifact,
    pools: bool,
    uncentered: bool,
    absorbed: bool,
    served: dict[str, int | float],
) -> Provenance:
    """The provenance of an export.

    For a calibrated artifact it names model, recipe and text. For an imported one it repeats what
    the imported files stated. `pools`, `uncentered` and `absorbed` say how the artifact was
    reduced: rotations pooled over heads, means left out, the value rotation in the weights.
    `served` holds the serving parameters.
    """
    # The generation id is the same for both sides of an export and differs between artifacts and
    # reductions. An import refuses two files whose ids differ.
    reduction = f"{artifact.identity} {pools} {uncentered} {absorbed}"
    generation = digest(reduction.encode())[:32]
    pooling = "layer" if pools else artifact.recipe.pooling
    imported = artifact.manifest.imported
    if imported is None:
        return _of_calibration(artifact, generation, pooling) | served
    # If the imported files stated nothing, the exported ones state nothing either.
    if not imported.calibration:
        return {}
    stated = dict(imported.calibration)
    if pools or uncentered:
        stated |= {"pooling": pooling, "generation_id": generation}
    return {**stated, **served}


def _of_calibration(artifact: Artifact, generation: str, pooling: str) -> Provenance:
    manifest, recipe = artifact.manifest, artifact.recipe
    model, data = manifest.model, manifest.calibration
    tokens, text_sha256 = (data.tokens, data.fingerprint) if data else (None, None)
    entries: dict[str, str | int | bool | None] = {
        "fitter": f"rotationzoo {manifest.versions.rotationzoo}",
        "generation_id": generation,
        "artifact": artifact.identity,
        "model": model.id,
        "model_revision": model.revision,
        "config_sha256": model.config_sha256,
        "weights_fingerprint": model.weights_fingerprint,
        "recipe": recipe.name,
        "recipe_sha256": manifest.recipe_sha256,
        "key_statistic": recipe.key_statistic,
        "value_statistic": recipe.value_statistic,
        "composition": recipe.composition,
        "pooling": pooling,
        "tokens": tokens,
        "text_sha256": text_sha256,
        "post_rope": True,
        "accumulator_dtype": "float64",
    }
    return {name: value for name, value in entries.items() if value is not None}
