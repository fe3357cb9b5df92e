"""Assembling an engine's payload: an artifact's matrices and serving parameters, reduced as the
user asked, and what the files state about the origin of their rotations."""

from rotationzoo.artifact.reductions import Settled, dropped_means, reduced_rotations
from rotationzoo.artifact.store import Artifact
from rotationzoo.engines.base import Payload, SideMatrices
from rotationzoo.engines.rotation_file import STATISTICS
from rotationzoo.model.own_name import find_model
from rotationzoo.rotations import SIDES, LayerRotations, Rotations
from rotationzoo.sides import rows_of
from rotationzoo.storage.files import digest

# OSCAR has no word for the exact `output` statistic. Files that rotationzoo writes state it under
# `calibration`.
_WORDS = {statistic: word for word, statistic in STATISTICS.items()} | {"output": "sst"}
PLACEHOLDER = "MODEL"
"""The placeholder in a launch command for a model whose location is unknown."""
Provenance = dict[str, str | int | float | bool]
"""Only primitives, so that a `.pt` file loads without running code."""


def provenance(artifact: Artifact, pools: bool, uncentered: bool, served: Provenance) -> Provenance:
    """The provenance of an export, with the serving parameters `served`: model, recipe and text of
    a calibration, or what imported files stated. The other flags say how the artifact was reduced:
    pooled over heads, or without means."""
    # The generation id is the same for both sides of an export and differs between artifacts and
    # reductions. An import refuses two files whose ids differ.
    reduction = f"{artifact.identity} {pools} {uncentered} False"  # as in earlier exports
    generation = digest(reduction.encode())[:32]
    pooling = "layer" if pools else artifact.recipe.pooling
    manifest, recipe = artifact.manifest, artifact.recipe
    if manifest.imported is not None:
        stated = dict(manifest.imported.calibration)
        if pools or uncentered:
            stated |= {"pooling": pooling, "generation_id": generation}
        # If the imported files stated nothing, the exported ones state nothing either.
        return {**stated, **served} if manifest.imported.calibration else {}
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
    return {name: value for name, value in entries.items() if value is not None} | served


def assemble_payload(artifact: Artifact, request: Settled) -> Payload:
    """The engine's payload, for a settled request. Raises `RotationZooError` if rotations should be
    pooled and cannot be."""
    recipe = artifact.recipe
    pools = request.pooled and artifact.rotations.per_head
    uncentered = dropped_means(artifact, request)
    rotations = reduced_rotations(artifact, pools, uncentered)
    key, value = (
        _side_matrices(rotations, side, _objective(artifact, side, pools)) for side in SIDES
    )
    (key_clip, value_clip), (sink, recent) = request.clip, request.windows
    served: Provenance = {"sink": sink, "recent": recent}
    served |= {"key_clip": key_clip, "value_clip": value_clip}
    if recipe.group_size is not None:
        served["group_size"] = recipe.group_size
    bits = {number: _most_bits(layer) for number, layer in artifact.rotations.items()}
    model = artifact.manifest.model  # only those from the hub have a revision
    return Payload(
        model=model.id if model.revision else str(find_model(artifact) or PLACEHOLDER),
        geometry=artifact.geometry,
        key=key,
        value=value,
        clip=request.clip,
        group_size=recipe.group_size,
        sink=sink,
        recent=recent,
        provenance=provenance(artifact, pools, bool(uncentered), served),
        bits=bits,
    )


def _most_bits(layer: LayerRotations) -> float:
    """Bits of a channel, on average over a row, of the side that has more."""
    rows = [layer[side] for side in SIDES]
    return 2 + max(int(row.fine_channels or 0) / row.dim for row in rows)


def _objective(artifact: Artifact, side: str, pools: bool) -> str:
    """The objective name, such as `qqt_r_h_pbr`: what imported files stated, unless pooling has
    fitted new rotations, or the words for the recipe's statistic and composition."""
    recipe, imported = artifact.recipe, artifact.manifest.imported
    if imported and not pools:
        pair = dict(zip(SIDES, rows_of(imported.objectives).pair, strict=True))
        return imported.objectives[pair[side]]
    if not recipe.has_eigenbasis:
        return recipe.composition
    statistic = recipe.key_statistic if side == "key" else recipe.value_statistic
    return f"{_WORDS[statistic]}_{recipe.composition}"


def _side_matrices(rotations: Rotations, side: str, objective: str) -> SideMatrices:
    """One side's matrices, without the head dimension if the heads of every layer share one."""
    layers = {layer: sides[side] for layer, sides in rotations.items()}
    per_head = any(rotation.per_head for rotation in layers.values())
    heads = slice(None) if per_head else 0
    matrices, eigenvalues, means = {}, {}, {}
    for layer, rotation in layers.items():
        matrices[layer] = rotation.matrix[heads]
        if rotation.eigenvalues is not None:
            eigenvalues[layer] = rotation.eigenvalues[heads]
        if rotation.mean is not None:
            means[layer] = rotation.mean
    return SideMatrices(matrices, objective, eigenvalues, means)
