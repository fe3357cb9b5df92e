"""Does an artifact belong to a model's weights? The model runs on some text; its statistics are
held against the rotations."""

from dataclasses import dataclass
from itertools import product

import torch

from rotationzoo.artifact.store import Artifact
from rotationzoo.calibration.collect import collect
from rotationzoo.calibration.fit import target_moment
from rotationzoo.errors import RotationZooError
from rotationzoo.linalg import compositions
from rotationzoo.model import loading
from rotationzoo.model.capture import check_transparent
from rotationzoo.model.geometry import Geometry, cached_layers
from rotationzoo.model.placement import memory_limits, place_weights
from rotationzoo.model.source import fetch, find
from rotationzoo.progress import Progress, silent
from rotationzoo.recipe import Data, Recipe
from rotationzoo.text.rows import read_corpus

TEXT = Data(tokens=4096, length=1024)
_FLOOR = 1e-6  # of the largest eigenvalue: below it a moment holds rounding alone
# scripts/check_probe.py measures 0.28 to 0.93 for a model's own rotations, whatever text they were
# made with, and at most 0.06 for those of other weights; docs/measurements.md has the distribution.
_OWN = 0.2


@dataclass(frozen=True)
class Agreement:
    """How far the directions that the rotations were made of are those of what the model computes,
    mean over layers and heads: 1 the very same, 0 no more than arbitrary ones. See `shares`."""

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
        return (
            "made of other weights"
            if self.foreign
            else "made of these weights, or of close relatives"
        )


def check_membership(
    artifact: Artifact,
    model: str,
    revision: str | None = None,
    device: str = "auto",
    progress: Progress = silent,
    device_map: str | None = None,
    max_memory: str | None = None,
) -> Agreement:
    """Run a model on the bundled text and compare. Raises `RotationZooError` for rotations that
    hold no eigenbasis."""
    memory_limits(device_map, max_memory)
    recipe, geometry = artifact.recipe, artifact.geometry
    bases = _bases(artifact, recipe, geometry)
    if not artifact.bound:
        raise RotationZooError(
            f"{artifact.folder} is bound to no model",
            hint=f"import its files again with --model {model}, then ask again",
        )
    source = find(model, revision)
    config = loading.load_config(source)
    fetch(source)
    text = read_corpus(TEXT, loading.load_tokenizer(source))
    with place_weights(device_map, max_memory) as placement:
        progress("loading the model", 0, 0)
        dtype = loading.torch_dtype("auto", device, device_map)
        loaded = loading.load(
            source, config, loading.torch_device(device), dtype, placement, predicts=False
        )
        with loading.forward_errors(model, 1, TEXT.length), torch.no_grad():
            check_transparent(loaded, text.rows[0][None, :32].to(loading.input_device(loaded)))
            statistics = collect(loaded, geometry, text.batches(1), recipe, progress=progress)
    moments = {
        (layer.index, side): target_moment(statistics, recipe, layer.index, side)
        for layer in cached_layers(geometry)
        for side in ("key", "value")
    }
    return agreement(bases, moments)


def _bases(
    artifact: Artifact, recipe: Recipe, geometry: Geometry
) -> dict[tuple[int, str], torch.Tensor]:
    """The eigenbases `[H, D, D]` that the rotations were composed of, by layer and side; of a
    search, which learns rotations, those of its statistics."""
    statistics = artifact.statistics if recipe.search is not None else None
    if not recipe.has_eigenbasis or (recipe.search is not None and statistics is None):
        raise RotationZooError(
            f"{artifact.folder} holds no eigenbasis to look for in a model (composition {recipe.composition})",
            hint="leave --run out",
        )
    bases = {}
    for layer, side in product(cached_layers(geometry), ("key", "value")):
        if statistics is not None:
            kind = recipe.key_statistic if side == "key" else recipe.value_statistic
            bases[layer.index, side] = compositions.eigenbasis(
                statistics[layer.index][kind].second_moment
            )[1]
        else:
            rotation = artifact.rotations[layer.index][side]
            group = recipe.group(rotation.dim)
            bases[layer.index, side] = compositions.recover_basis(
                rotation.matrix, recipe.composition, group
            )
    return bases


def agreement(
    bases: dict[tuple[int, str], torch.Tensor], moments: dict[tuple[int, str], torch.Tensor]
) -> Agreement:
    """Of eigenbases `[H, D, D]` with second moments `[H, D, D]`, by layer and side; H = 1 where the
    rotations are pooled."""
    found: dict[str, list[torch.Tensor]] = {"key": [], "value": []}
    for (layer, side), moment in moments.items():
        found[side].append(shares(bases[layer, side], moment))
    key, value = (torch.cat(found[side]).mean().item() for side in ("key", "value"))
    return Agreement(key, value)


def shares(basis: torch.Tensor, moment: torch.Tensor) -> torch.Tensor:
    """`[H]`: how much of the structure of second moments `[H, D, D]` a basis (columns ascending)
    explains.

    The cosine of the logarithm of the moment with the matrix of the same eigenvalues and this
    basis, both without their traces. Logarithms weigh all directions alike, and directions of
    near-equal eigenvalues, which every other text turns, cost nothing.
    """
    values, own = torch.linalg.eigh(moment.double())
    logarithms = values.clamp(min=_FLOOR * values.amax().item()).log()
    matrix = own @ torch.diag_embed(logarithms) @ own.mT
    spread = logarithms - logarithms.mean(-1, keepdim=True)
    seen = (basis.double().mT @ matrix @ basis.double()).diagonal(dim1=-2, dim2=-1)
    return (seen * spread).sum(-1) / spread.square().sum(-1).clamp(min=1e-12)
