"""Does an artifact belong to a model's weights? The model runs on some text; its statistics are held against the rotations."""

from dataclasses import dataclass
from itertools import product

import torch

from rotationzoo import corpus, models, rotation
from rotationzoo.artifact import Artifact
from rotationzoo.capture import check_transparent
from rotationzoo.collect import Progress, collect, silent
from rotationzoo.errors import RotationZooError
from rotationzoo.fit import target_moment
from rotationzoo.geometry import Geometry, cached_layers, geometry_from_json
from rotationzoo.moments import tensor_name
from rotationzoo.recipe import Data, Recipe
from rotationzoo.source import fetch, find

TEXT = Data(tokens=4096, length=1024)
_FLOOR = 1e-6  # of the largest eigenvalue: below it a moment holds rounding alone
# scripts/check_probe.py measures 0.28 to 0.93 for a model's own rotations, whatever text they were made with, and at most 0.06
# for those of other weights; docs/measurements.md has the distribution.
_OWN = 0.2


@dataclass(frozen=True)
class Agreement:
    """How far the directions that the rotations were made of are those of what the model computes, mean over layers and
    heads: 1 the very same, 0 no more than arbitrary ones. See `shares`."""

    key: float
    value: float

    @property
    def lowest(self) -> float:
        """What decides: keys of any two models share what RoPE does to them."""
        return min(self.key, self.value)

    @property
    def foreign(self) -> bool:
        return self.lowest < _OWN

    @property
    def verdict(self) -> str:
        return "made of other weights" if self.foreign else "made of these weights, or of close relatives"


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
    geometry = geometry_from_json(there.manifest["geometry"])
    bases = _bases(there, recipe, geometry)
    if not there.bound:
        raise RotationZooError(
            f"{there.folder} is bound to no model", hint=f"import its files again with --model {model}, then ask again"
        )
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
    return agreement(bases, moments)


def _bases(there: Artifact, recipe: Recipe, geometry: Geometry) -> dict[tuple[int, str], torch.Tensor]:
    """The eigenbases `[H, D, D]` that the rotations were composed of, by layer and side; of a search, which learns
    rotations, those of its statistics."""
    statistics = there.statistics() if recipe.search is not None else None
    if not recipe.has_eigenbasis or (recipe.search is not None and statistics is None):
        raise RotationZooError(
            f"{there.folder} holds no eigenbasis to look for in a model (composition {recipe.composition})",
            hint="leave --run out",
        )
    rotations = there.rotations()
    bases = {}
    for layer, side in product(cached_layers(geometry), ("key", "value")):
        if statistics is not None:
            kind = recipe.key_statistic if side == "key" else recipe.value_statistic
            bases[layer.index, side] = rotation.eigenbasis(statistics[tensor_name(layer.index, kind)])[1]
        else:
            matrix = rotations[f"layers.{layer.index}.{side}.rotation"]
            group = recipe.group(matrix.shape[-1])
            bases[layer.index, side] = rotation.recover_basis(matrix, recipe.composition, group)
    return bases


def agreement(bases: dict[tuple[int, str], torch.Tensor], moments: dict[tuple[int, str], torch.Tensor]) -> Agreement:
    """Of eigenbases `[H, D, D]` with second moments `[H, D, D]`, by layer and side; H = 1 where the rotations are pooled."""
    found: dict[str, list[torch.Tensor]] = {"key": [], "value": []}
    for (layer, side), moment in moments.items():
        found[side].append(shares(bases[layer, side], moment))
    key, value = (torch.cat(found[side]).mean().item() for side in ("key", "value"))
    return Agreement(key, value)


def shares(basis: torch.Tensor, moment: torch.Tensor) -> torch.Tensor:
    """`[H]`: how much of the structure of second moments `[H, D, D]` a basis (columns ascending) explains.

    The cosine of the logarithm of the moment with the matrix of the same eigenvalues and this basis, both without their
    traces. Logarithms weigh all directions alike, and directions of near-equal eigenvalues, which every other text
    turns, cost nothing.
    """
    values, own = torch.linalg.eigh(moment.double())
    logarithms = values.clamp(min=_FLOOR * values.amax().item()).log()
    matrix = own @ torch.diag_embed(logarithms) @ own.mT
    spread = logarithms - logarithms.mean(-1, keepdim=True)
    seen = (basis.double().mT @ matrix @ basis.double()).diagonal(dim1=-2, dim2=-1)
    return (seen * spread).sum(-1) / spread.square().sum(-1).clamp(min=1e-12)
