"""What an engine is handed of an artifact: its sides, its provenance and what to serve with,
reduced as the user asked."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rotationzoo.artifact.store import Artifact
from rotationzoo.calibration.fit import fit
from rotationzoo.engines.base import SIDES, WORDS, Options, Payload, Side
from rotationzoo.errors import RotationZooError
from rotationzoo.linalg.compositions import GIVEN
from rotationzoo.linalg.moments import sums
from rotationzoo.model.source import DEMO, Source, config_hash
from rotationzoo.recipe import Recipe
from rotationzoo.rotations import Rotations
from rotationzoo.storage.files import digest

PLACEHOLDER = "MODEL"
"""What a launch line has for a model whose place is not known."""


@dataclass(frozen=True)
class Request:
    """What the user asks for and agrees to. `clip` (ratios of keys and of values) and `windows`
    (sink and recent tokens) replace the artifact's own."""

    engine: str
    output: Path | None = None
    pooled: bool = False
    uncentered: bool = False
    clip: tuple[float, float] | None = None
    windows: tuple[int, int] | None = None
    values_absorbed: Path | None = None
    """The model that carries the value rotation already, as `absorb` wrote it."""
    options: Options = field(default_factory=Options)


Clips = Mapping[int, tuple[list[float], list[float]]]
"""Layer -> the different clip ratios of its heads, of keys and of values."""


def assemble(artifact: Artifact, request: Request, clips: Clips, absorbed: str | None) -> Payload:
    """All of it; `absorbed` is the model that carries the value rotation already. Raises
    `RotationZooError` for an artifact that cannot be pooled."""
    recipe, geometry, rotations = artifact.recipe, artifact.geometry, artifact.rotations
    pools = request.pooled and rotations.per_head
    if pools:
        rotations = pooled(artifact)
    key, value = (_side(artifact, rotations, side, request, pools) for side in SIDES)
    sink, recent = request.windows or (recipe.sink, recipe.recent)
    return Payload(
        model=absorbed or _model_to_serve(artifact),
        geometry=geometry,
        key=key,
        value=None if absorbed else value,
        clips={layer: (keys[0], values[0]) for layer, (keys, values) in clips.items()},
        group_size=recipe.group_size,
        sink=sink,
        recent=recent,
        provenance=_provenance(
            artifact, recipe, request, pools, _served(clips, recipe, sink, recent)
        ),
    )


def pooled(artifact: Artifact) -> Rotations:
    """Rotations fitted from the statistics pooled over heads; the mean of rotations would be no
    rotation."""
    recipe, statistics = artifact.recipe, artifact.statistics
    if recipe.composition == GIVEN or (recipe.needs_statistics and statistics is None):
        raise RotationZooError(
            f"{artifact.folder} cannot be pooled: it has no statistics to fit one rotation per layer from",
            hint="fetch it with its statistics, or make one with: rotationzoo calibrate MODEL",
        )
    # The key mean is the artifact's own: what was recovered from imported files has none.
    changes: dict[str, Any] = {
        "pooling": "layer",
        "center_keys": False,
        "center_values": False,
        "search": None,
    }
    # What a search found for single heads is left behind, but for the clip.
    changes |= {f"{side}_clip": ratio for side, ratio in artifact.clip_ratios.items()}
    shared = recipe.model_copy(update=changes)
    one_a_layer = fit(None if statistics is None else sums(statistics), shared, artifact.geometry)
    return one_a_layer.replace(
        lambda layer, side, rotation: replace(rotation, mean=artifact.rotations[layer][side].mean)
    )


def _side(
    artifact: Artifact, rotations: Rotations, side: str, request: Request, pools: bool
) -> Side:
    of_layers = {layer: sides[side] for layer, sides in rotations.items()}
    matrices = {layer: one.matrix for layer, one in of_layers.items()}
    eigenvalues = {
        layer: one.eigenvalues for layer, one in of_layers.items() if one.eigenvalues is not None
    }
    if not any(one.per_head for one in of_layers.values()):
        matrices = {layer: matrix[0] for layer, matrix in matrices.items()}
        eigenvalues = {layer: values[0] for layer, values in eigenvalues.items()}
    means = {layer: one.mean for layer, one in of_layers.items() if one.mean is not None}
    if request.uncentered:
        means = {}
    imported = artifact.manifest.imported
    if imported and not pools:
        return Side(matrices, imported.objectives[side], eigenvalues, means)
    return Side(matrices, objective(artifact.recipe, side), eigenvalues, means)


def objective(recipe: Recipe, side: str) -> str:
    """Statistic and composition in the words of OSCAR's files; which V^T S^T S V it was is in the
    provenance."""
    if not recipe.has_eigenbasis:
        return recipe.composition
    words = {ours: theirs for theirs, ours in WORDS.items()} | {"output": "sst"}
    return f"{words[recipe.key_statistic if side == 'key' else recipe.value_statistic]}_{recipe.composition}"


def _provenance(
    artifact: Artifact,
    recipe: Recipe,
    request: Request,
    pools: bool,
    served: dict[str, int | float],
) -> dict[str, str | int | float | bool]:
    """Primitives alone, so that a `.pt` file loads without running anything. Of imported files what
    they said themselves."""
    manifest = artifact.manifest
    uncentered = request.uncentered and bool(recipe.centered)
    reduction = f"{artifact.identity} {pools} {uncentered} {request.values_absorbed is not None}"
    generation = {
        "generation_id": digest(reduction.encode())[:32]
    }  # both sides of one export, and of no other
    if manifest.imported is not None:
        said = manifest.imported.calibration
        changed = (
            {"pooling": "layer" if pools else recipe.pooling, **generation}
            if pools or uncentered
            else {}
        )
        return {**said, **changed, **served} if said else {}
    model, data = manifest.model, manifest.calibration
    found = {
        "fitter": f"rotationzoo {manifest.versions.rotationzoo}", **generation, "artifact": artifact.identity,
        "model": model.id, "model_revision": model.revision, "config_sha256": model.config_sha256,
        "weights_fingerprint": model.weights_fingerprint, "recipe": recipe.name, "recipe_sha256": manifest.recipe_sha256,
        "key_statistic": recipe.key_statistic, "value_statistic": recipe.value_statistic, "composition": recipe.composition,
        "pooling": "layer" if pools else recipe.pooling, "tokens": None if data is None else data.tokens,
        "text_sha256": None if data is None else data.fingerprint, "post_rope": True, "accumulator_dtype": "float64",
    }  # fmt: skip
    return {name: value for name, value in found.items() if value is not None} | served


def _model_to_serve(artifact: Artifact) -> str | None:
    """The hub id of the model, or the demo's folder, or a word for another folder, whose place is
    not known here; None for one that nobody has named."""
    model = artifact.manifest.model
    if not artifact.bound or model.revision:
        return model.id if artifact.bound else None
    demo = Source("demo", DEMO, None)
    return (
        str(DEMO)
        if (model.id, model.config_sha256) == (demo.name, config_hash(demo))
        else PLACEHOLDER
    )


def _served(clips: Clips, recipe: Recipe, sink: int, recent: int) -> dict[str, int | float]:
    """What to serve with, for those who import the files again; clip ratios only where all layers
    share them."""
    found: dict[str, int | float] = {"sink": sink, "recent": recent}
    if recipe.group_size is not None:
        found["group_size"] = recipe.group_size
    for number, name in enumerate(("key_clip", "value_clip")):
        ratios = {ratio for pair in clips.values() for ratio in pair[number]}
        if len(ratios) == 1:
            found[name] = ratios.pop()
    return found
