"""What an engine is handed of an artifact: its sides, its provenance and what to serve with, reduced as the user asked."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rotationzoo.artifact import Artifact, clip_ratios, digest
from rotationzoo.engines import SIDES, WORDS, Options, Serving, Side
from rotationzoo.errors import RotationZooError
from rotationzoo.fit import fit
from rotationzoo.geometry import Geometry, cached_layers, geometry_from_json
from rotationzoo.moments import from_tensors
from rotationzoo.recipe import Recipe
from rotationzoo.rotation import GIVEN
from rotationzoo.source import DEMO, Source, config_hash

PLACEHOLDER = "MODEL"
"""What a launch line has for a model whose place is not known."""


@dataclass(frozen=True)
class Request:
    """What the user asks for and agrees to. `clip` (ratios of keys and of values) and `windows` (sink and recent tokens)
    replace the artifact's own."""

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


def assemble(there: Artifact, request: Request, clips: Clips, absorbed: str | None) -> Serving:
    """All of it; `absorbed` is the model that carries the value rotation already. Raises `RotationZooError` for an artifact
    that cannot be pooled."""
    recipe, geometry = Recipe.model_validate(there.manifest["recipe"]), geometry_from_json(there.manifest["geometry"])
    tensors = there.rotations()
    pools = request.pooled and per_head(tensors, geometry)
    if pools:
        tensors = pooled(there, recipe, geometry)
    key, value = (_side(there, tensors, recipe, geometry, side, request, pools) for side in SIDES)
    sink, recent = request.windows or (recipe.sink, recipe.recent)
    return Serving(
        model=absorbed or _model_to_serve(there),
        geometry=geometry,
        key=key,
        value=None if absorbed else value,
        clips={layer: (keys[0], values[0]) for layer, (keys, values) in clips.items()},
        group_size=recipe.group_size,
        sink=sink,
        recent=recent,
        provenance=_provenance(there, recipe, request, pools, _served(clips, recipe, sink, recent)),
    )


def per_head(tensors: Mapping[str, torch.Tensor], geometry: Geometry) -> bool:
    return any(len(tensors[f"layers.{layer.index}.{side}.rotation"]) > 1 for layer in cached_layers(geometry) for side in SIDES)


def pooled(there: Artifact, recipe: Recipe, geometry: Geometry) -> dict[str, torch.Tensor]:
    """Rotations fitted from the statistics pooled over heads; the mean of rotations would be no rotation."""
    statistics = there.statistics()
    if recipe.composition == GIVEN or (recipe.needs_statistics and statistics is None):
        raise RotationZooError(
            f"{there.folder} cannot be pooled: it has no statistics to fit one rotation per layer from",
            hint="fetch it with its statistics, or make one with: rotationzoo calibrate MODEL",
        )
    # The key mean is the artifact's own: what was recovered from imported files has none.
    changes: dict[str, Any] = {"pooling": "layer", "center_keys": False, "center_values": False, "search": None}
    # What a search found for single heads is left behind, but for the clip.
    changes |= {f"{side}_clip": ratio for side, ratio in clip_ratios(there.manifest).items()}
    shared = recipe.model_copy(update=changes)
    means = {name: tensor for name, tensor in there.rotations().items() if name.endswith(".mean")}
    return fit(None if statistics is None else from_tensors(statistics), shared, geometry) | means


def _side(
    there: Artifact,
    tensors: Mapping[str, torch.Tensor],
    recipe: Recipe,
    geometry: Geometry,
    side: str,
    request: Request,
    pools: bool,
) -> Side:
    def of(kind: str) -> dict[int, torch.Tensor]:
        names = {layer.index: f"layers.{layer.index}.{side}.{kind}" for layer in cached_layers(geometry)}
        return {layer: tensors[name] for layer, name in names.items() if name in tensors}

    rotation, eigenvalues = of("rotation"), of("eigenvalues")
    if all(len(matrix) == 1 for matrix in rotation.values()):
        rotation = {layer: matrix[0] for layer, matrix in rotation.items()}
        eigenvalues = {layer: values[0] for layer, values in eigenvalues.items()}
    mean = of("mean") if not request.uncentered else {}
    imported = there.manifest.get("imported")
    if imported and not pools:
        return Side(rotation, imported["objectives"][side], eigenvalues, mean)
    return Side(rotation, objective(recipe, side), eigenvalues, mean)


def objective(recipe: Recipe, side: str) -> str:
    """Statistic and composition in the words of OSCAR's files; which V^T S^T S V it was is in the provenance."""
    if not recipe.has_eigenbasis:
        return recipe.composition
    words = {ours: theirs for theirs, ours in WORDS.items()} | {"output": "sst"}
    return f"{words[recipe.key_statistic if side == 'key' else recipe.value_statistic]}_{recipe.composition}"


def _provenance(
    there: Artifact, recipe: Recipe, request: Request, pools: bool, served: dict[str, int | float]
) -> dict[str, str | int | float | bool]:
    """Primitives alone, so that a `.pt` file loads without running anything. Of imported files what they said themselves."""
    manifest = there.manifest
    uncentered = request.uncentered and bool(recipe.centered)
    reduction = f"{there.identity} {pools} {uncentered} {request.values_absorbed is not None}"
    generation = {"generation_id": digest(reduction.encode())[:32]}  # both sides of one export, and of no other
    if "imported" in manifest:
        said = manifest["imported"]["calibration"]
        changed = {"pooling": "layer" if pools else recipe.pooling, **generation} if pools or uncentered else {}
        return {**said, **changed, **served} if said else {}
    model, data = manifest["model"], manifest["calibration"] or {}
    found = {
        "fitter": f"rotationzoo {manifest['versions']['rotationzoo']}", **generation, "artifact": there.identity,
        "model": model["id"], "model_revision": model["revision"], "config_sha256": model["config_sha256"],
        "weights_fingerprint": model["weights_fingerprint"], "recipe": recipe.name, "recipe_sha256": manifest["recipe_sha256"],
        "key_statistic": recipe.key_statistic, "value_statistic": recipe.value_statistic, "composition": recipe.composition,
        "pooling": "layer" if pools else recipe.pooling, "tokens": data.get("tokens"),
        "text_sha256": data.get("fingerprint"), "post_rope": True, "accumulator_dtype": "float64",
    }  # fmt: skip
    return {name: value for name, value in found.items() if value is not None} | served


def _model_to_serve(there: Artifact) -> str | None:
    """The hub id of the model, or the demo's folder, or a word for another folder, whose place is not known here; None for
    one that nobody has named."""
    model = there.manifest["model"]
    if not there.bound or model["revision"]:
        return model["id"] if there.bound else None
    demo = Source("demo", DEMO, None)
    return str(DEMO) if (model["id"], model["config_sha256"]) == (demo.name, config_hash(demo)) else PLACEHOLDER


def _served(clips: Clips, recipe: Recipe, sink: int, recent: int) -> dict[str, int | float]:
    """What to serve with, for those who import the files again; clip ratios only where all layers share them."""
    found: dict[str, int | float] = {"sink": sink, "recent": recent}
    if recipe.group_size is not None:
        found["group_size"] = recipe.group_size
    for number, name in enumerate(("key_clip", "value_clip")):
        ratios = {ratio for pair in clips.values() for ratio in pair[number]}
        if len(ratios) == 1:
            found[name] = ratios.pop()
    return found
