"""The payload of an engine: the matrices, the provenance and the serving parameters of an artifact,
reduced as the user asked."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rotationzoo.artifact.store import Artifact
from rotationzoo.calibration.fit import fit
from rotationzoo.engines.base import Options, Payload, SideMatrices
from rotationzoo.engines.objectives import objective_of
from rotationzoo.engines.provenance import provenance
from rotationzoo.errors import RotationZooError
from rotationzoo.linalg.compositions import GIVEN
from rotationzoo.linalg.moments import sums
from rotationzoo.model.source import DEMO, Source, config_hash
from rotationzoo.rotations import SIDES, Rotation, Rotations

PLACEHOLDER = "MODEL"
"""What a launch line has for a model whose place is not known."""

Clips = Mapping[int, tuple[list[float], list[float]]]
"""Layer -> the different clip ratios of its heads, of keys and of values, ascending."""


@dataclass(frozen=True)
class Request:
    """One export as the user asked for it, with what may be left out."""

    engine: str
    output: Path | None = None
    pooled: bool = False
    """One rotation per layer instead of one per KV head."""
    uncentered: bool = False
    """Keys and values keep their mean."""
    clip: tuple[float, float] | None = None
    """Clip ratios of keys and of values, instead of the artifact's own."""
    windows: tuple[int, int] | None = None
    """Sink and recent tokens, instead of the artifact's own."""
    values_absorbed: Path | None = None
    """The model that carries the value rotation already, as `absorb` wrote it."""
    options: Options = field(default_factory=Options)


def requested_clips(rotations: Rotations, request: Request) -> Clips:
    """The clip ratios to serve with: the user's, or the artifact's own."""
    if request.clip is not None:
        key_clip, value_clip = request.clip
        return {layer: ([key_clip], [value_clip]) for layer in rotations}
    return {
        layer: (_different(sides.key), _different(sides.value))
        for layer, sides in rotations.items()
    }


def assemble_payload(
    artifact: Artifact, request: Request, clips: Clips, absorbed: str | None
) -> Payload:
    """What the engine is given; `absorbed` is the model that carries the value rotation already.

    Raises `RotationZooError` for an artifact that cannot be pooled.
    """
    recipe, rotations = artifact.recipe, artifact.rotations
    pools = request.pooled and rotations.per_head
    if pools:
        rotations = pooled_rotations(artifact)
    key, value = (
        _side_matrices(rotations, side, _objective(artifact, side, pools)) for side in SIDES
    )
    if request.uncentered:
        key, value = replace(key, mean={}), replace(value, mean={})
    sink, recent = request.windows or (recipe.sink, recipe.recent)
    served = _served(clips, recipe.group_size, sink, recent)
    single_clips = {layer: (keys[0], values[0]) for layer, (keys, values) in clips.items()}
    return Payload(
        model=absorbed or _model_to_serve(artifact),
        geometry=artifact.geometry,
        key=key,
        value=None if absorbed else value,
        clips=single_clips,
        group_size=recipe.group_size,
        sink=sink,
        recent=recent,
        provenance=provenance(
            artifact,
            pools=pools,
            uncentered=request.uncentered and bool(recipe.centered),
            absorbed=request.values_absorbed is not None,
            served=served,
        ),
    )


def pooled_rotations(artifact: Artifact) -> Rotations:
    """Rotations fitted from the statistics pooled over heads; the mean of rotations would be no
    rotation."""
    recipe, statistics = artifact.recipe, artifact.statistics
    if recipe.composition == GIVEN or (recipe.needs_statistics and statistics is None):
        raise RotationZooError(
            f"{artifact.folder} cannot be pooled: it has no statistics to fit one rotation per "
            "layer from",
            hint="fetch it with its statistics, or make one with: rotationzoo calibrate MODEL",
        )
    # The key mean is the artifact's own: what was recovered from imported files has none.
    changes: dict[str, Any] = {
        "pooling": "layer",
        "center_keys": False,
        "center_values": False,
        "search": None,
    }
    # What a search chose for single heads is left behind, but for the clip.
    changes |= {f"{side}_clip": ratio for side, ratio in artifact.clip_ratios.items()}
    pooled_recipe = recipe.model_copy(update=changes)
    moments = None if statistics is None else sums(statistics)
    fitted = fit(moments, pooled_recipe, artifact.geometry)
    return fitted.replace(
        lambda layer, side, rotation: replace(rotation, mean=artifact.rotations[layer][side].mean)
    )


def _different(rotation: Rotation) -> list[float]:
    return sorted(set(rotation.clip.tolist()))


def _objective(artifact: Artifact, side: str, pools: bool) -> str:
    """Of imported files what they said themselves, unless the rotations were fitted again."""
    imported = artifact.manifest.imported
    if imported and not pools:
        return imported.objectives[side]
    return objective_of(artifact.recipe, side)


def _side_matrices(rotations: Rotations, side: str, objective: str) -> SideMatrices:
    """One side, without a dimension of heads where the heads of all layers share theirs."""
    layers = {layer: sides[side] for layer, sides in rotations.items()}
    per_head = any(rotation.per_head for rotation in layers.values())
    matrices, eigenvalues, means = {}, {}, {}
    for layer, rotation in layers.items():
        matrices[layer] = rotation.matrix if per_head else rotation.matrix[0]
        if rotation.eigenvalues is not None:
            eigenvalues[layer] = rotation.eigenvalues if per_head else rotation.eigenvalues[0]
        if rotation.mean is not None:
            means[layer] = rotation.mean
    return SideMatrices(matrices, objective, eigenvalues, means)


def _model_to_serve(artifact: Artifact) -> str | None:
    """The hub id of the model, or the demo's folder, or a placeholder for another folder, whose
    place is not known here; None for one that nobody has named."""
    if not artifact.bound:
        return None
    model = artifact.manifest.model
    if model.revision:
        return model.id
    demo = Source("demo", DEMO, None)
    is_demo = (model.id, model.config_sha256) == (demo.name, config_hash(demo))
    return str(DEMO) if is_demo else PLACEHOLDER


def _served(clips: Clips, group_size: int | None, sink: int, recent: int) -> dict[str, int | float]:
    """What to serve with, for those who import the files again; clip ratios only where all layers
    share them."""
    served: dict[str, int | float] = {"sink": sink, "recent": recent}
    if group_size is not None:
        served["group_size"] = group_size
    for index, name in enumerate(("key_clip", "value_clip")):
        ratios = {ratio for sides in clips.values() for ratio in sides[index]}
        if len(ratios) == 1:
            served[name] = ratios.pop()
    return served
