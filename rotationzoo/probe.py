"""Does an artifact belong to a model's weights? The model runs on some text; its statistics are held against the rotations."""

from dataclasses import dataclass

import torch

from rotationzoo import corpus, models, rotation
from rotationzoo.artifact import Artifact
from rotationzoo.capture import check_transparent
from rotationzoo.collect import Progress, collect, silent
from rotationzoo.errors import RotationZooError
from rotationzoo.fit import target_moment
from rotationzoo.geometry import Geometry, cached_layers, geometry_from_json
from rotationzoo.recipe import Data, Recipe
from rotationzoo.source import fetch, find

TEXT = Data(tokens=4096, length=1024)
_STRONGEST = 8  # of D directions one in so many counts as strong
# Measured: 0.68 to 0.92 for a model's own rotations on other text, 0.29 to 0.56 for siblings of it whose channels were
# rescaled, 0.01 for weights that have nothing in common.
_OWN, _FOREIGN = 0.6, 0.2


@dataclass(frozen=True)
class Agreement:
    """How much of the energy of the model's strongest directions lies in those that the rotations were made of, mean over
    layers and heads: 1 as much as can, 0 no more than in arbitrary directions."""

    key: float
    value: float

    @property
    def lowest(self) -> float:
        return min(self.key, self.value)

    @property
    def foreign(self) -> bool:
        return self.lowest < _FOREIGN

    @property
    def verdict(self) -> str:
        if self.foreign:
            return "made of other weights"
        return "its own" if self.lowest >= _OWN else "not clear: weights related to its own, or very different text"


def probe(
    there: Artifact,
    model: str,
    revision: str | None = None,
    device: str = "auto",
    progress: Progress = silent,
    device_map: str | None = None,
    max_memory: str | None = None,
) -> Agreement:
    """Run a model on the bundled text and compare. Raises `RotationZooError` for rotations that hold no eigenbasis."""
    models.memory_limits(device_map, max_memory)
    recipe = Recipe.model_validate(there.manifest["recipe"])
    if not recipe.has_eigenbasis:
        raise RotationZooError(
            f"{there.folder} holds no eigenbasis to look for in a model (composition {recipe.composition})",
            hint="leave --run out",
        )
    if not there.bound:
        raise RotationZooError(
            f"{there.folder} is bound to no model", hint=f"import its files again with --model {model}, then ask again"
        )
    geometry = geometry_from_json(there.manifest["geometry"])
    source = find(model, revision)
    config = models.load_config(source)
    fetch(source)
    text = corpus.read(TEXT, models.load_tokenizer(source))
    with models.placement(device_map, max_memory) as placement:
        progress("loading the model", 0, 0)
        dtype = models.torch_dtype("auto", device, device_map)
        loaded = models.load(source, config, models.torch_device(device), dtype, placement, predicts=False)
        with models.forward_errors(model, 1, TEXT.length), torch.no_grad():
            check_transparent(loaded, text.rows[0][None, :32].to(models.input_device(loaded)))
            statistics = collect(loaded, geometry, text.batches(1), recipe, progress=progress)
    moments = {
        (layer.index, side): target_moment(statistics, recipe, layer.index, side)
        for layer in cached_layers(geometry)
        for side in ("key", "value")
    }
    return agreement(there.rotations(), moments, recipe, geometry)


def agreement(
    rotations: dict[str, torch.Tensor], moments: dict[tuple[int, str], torch.Tensor], recipe: Recipe, geometry: Geometry
) -> Agreement:
    """`moments` are second moments `[H, D, D]` by layer and side; H = 1 where the rotations are pooled."""
    shares: dict[str, list[torch.Tensor]] = {"key": [], "value": []}
    for layer in cached_layers(geometry):
        for side, found in shares.items():
            matrix = rotations[f"layers.{layer.index}.{side}.rotation"]
            dim = matrix.shape[-1]
            count = max(1, dim // _STRONGEST)
            moment = moments[layer.index, side]
            strong = rotation.recover_basis(matrix, recipe.composition, recipe.group(dim))[..., -count:]
            trace = moment.diagonal(dim1=-2, dim2=-1).sum(-1)
            theirs = (strong.mT @ moment @ strong).diagonal(dim1=-2, dim2=-1).sum(-1) / trace
            best = torch.linalg.eigvalsh(moment)[..., -count:].sum(-1) / trace
            found.append((theirs - count / dim) / (best - count / dim).clamp(min=1e-12))
    key, value = (torch.cat(found).mean().item() for found in shares.values())
    return Agreement(key, value)
