"""Runs a model on a text and compares its statistics with an artifact's rotations."""

from dataclasses import dataclass

import torch

from rotationzoo.artifact.fit import target_moment
from rotationzoo.artifact.store import Artifact
from rotationzoo.calibration.collect import collect
from rotationzoo.errors import RotationZooError
from rotationzoo.linalg import compositions
from rotationzoo.model import loading
from rotationzoo.model.capture import check_transparent
from rotationzoo.model.compatibility import check_artifacts
from rotationzoo.model.geometry import geometry_on_meta
from rotationzoo.model.placement import memory_limits, place_weights
from rotationzoo.model.quantized import check_loadable
from rotationzoo.model.source import fetch, find
from rotationzoo.progress import Progress, silent
from rotationzoo.recipe import Data
from rotationzoo.settings import RunSettings
from rotationzoo.text.rows import read_corpus

TEXT = Data(tokens=4096, length=1024)
_TRANSPARENCY_TOKENS = 32
_FLOOR = 1e-6  # relative to the largest eigenvalue: smaller ones are only rounding
# A model's own rotations measured 0.25 to 0.93, after any calibration text, and those
# of other weights at most 0.06. docs/history.md shows the distribution.
_LOWEST_OF_RELATIVES = 0.2


@dataclass(frozen=True)
class Agreement:
    """How well the eigenbases inside the rotations match those of the model's statistics.

    Means over layers and heads (`explained_share`): 1 for equal eigenbases, about 0 for unrelated
    ones. Latents have one figure twice.
    """

    key: float
    value: float

    @property
    def lowest(self) -> float:
        """The smaller one decides: RoPE makes keys of any two models agree a little."""
        return min(self.key, self.value)

    @property
    def foreign(self) -> bool:
        """Whether the rotations were made from other weights."""
        return self.lowest < _LOWEST_OF_RELATIVES

    @property
    def verdict(self) -> str:
        """The answer in words."""
        if self.foreign:
            return "made of other weights"
        return "made of these weights, or of close relatives"


@dataclass(frozen=True)
class Candidate(RunSettings):
    """The model that an artifact may belong to, and where to run it."""

    model: str


def check_membership(
    artifact: Artifact, candidate: Candidate, progress: Progress = silent
) -> Agreement:
    """Compare a model's statistics with rotations. Raises `RotationZooError` without an
    eigenbasis."""
    memory_limits(candidate.device_map, candidate.max_memory)
    recipe = artifact.recipe
    if not recipe.has_eigenbasis:
        problem = f"{artifact.folder} holds no eigenbasis to look for in a model"
        raise RotationZooError(f"{problem} (composition {recipe.composition})", "leave --run out")
    rotations = list(artifact.rotations.each())  # read before the weights are fetched
    source = find(candidate.model, candidate.revision)
    config = loading.load_config(source, recipe.rope_scaling)
    geometry = geometry_on_meta(loading.on_meta(config, source.name))
    if geometry is not None:  # before the weights are fetched
        check_artifacts(candidate.model, [artifact], geometry)
    # As a calibration with the artifact's recipe would collect them.
    check_loadable(config, source.name, candidate.torch_device)
    fetch(source)
    text = read_corpus(TEXT, loading.load_tokenizer(source))
    loading.check_ids(text.rows, config, source.name)
    with place_weights(candidate.device_map, candidate.max_memory) as placement:
        progress("loading the model", 0, 0)
        how = candidate.torch_device, candidate.torch_dtype, placement
        model = loading.load(source, config, *how, predicts=False)
        with loading.forward_errors(candidate.model, 1, TEXT.length), torch.no_grad():
            first_tokens = text.rows[0][None, :_TRANSPARENCY_TOKENS]
            check_transparent(model, first_tokens.to(loading.input_device(model)))
            batches = text.batches(1)
            statistics = collect(model, artifact.geometry, batches, recipe, progress=progress)
    shares: dict[str, list[torch.Tensor]] = {}
    for layer, side, rotation in rotations:
        group = recipe.group(rotation.dim)
        basis = compositions.recover_basis(rotation.matrix, recipe.composition, group)
        moment = target_moment(statistics[layer], recipe, side)
        shares.setdefault(side, []).append(explained_share(basis, moment))
    means = {side: torch.cat(parts).mean().item() for side, parts in shares.items()}
    return Agreement(*(means[side] for side in artifact.rotations.cached.pair))


def explained_share(basis: torch.Tensor, moment: torch.Tensor) -> torch.Tensor:
    """How much of the structure of moments `[H, D, D]` a basis of ascending order explains, `[H]`.

    The share is the cosine between the moment's logarithm and the matrix with its eigenvalues in
    this basis, both traceless. Directions with nearly equal eigenvalues do not lower it.
    """
    eigenvalues, vectors = compositions.eigenbasis(moment)
    logarithms = eigenvalues.clamp(min=_FLOOR * eigenvalues.amax().item()).log()
    logarithm = vectors @ torch.diag_embed(logarithms) @ vectors.mT
    spread = logarithms - logarithms.mean(-1, keepdim=True)
    in_basis = (basis.double().mT @ logarithm @ basis.double()).diagonal(dim1=-2, dim2=-1)
    share: torch.Tensor = (in_basis * spread).sum(-1) / spread.square().sum(-1).clamp(min=1e-12)
    return share
