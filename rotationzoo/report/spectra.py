"""Spectra of an artifact, layer by layer: how concentrated its statistics are, and how orthogonal
its rotations."""

from dataclasses import dataclass

import torch

from rotationzoo.artifact.store import Artifact
from rotationzoo.geometry import cached_layers
from rotationzoo.linalg.compositions import strongest
from rotationzoo.linalg.error_feedback import remaining_share
from rotationzoo.linalg.orthogonality import orthogonality_error
from rotationzoo.rotations import Rotation


@dataclass(frozen=True)
class SideSpectrum:
    """One side of a layer, averaged over its matrices.

    `effective_rank` is the exponential of the entropy of the normalised eigenvalues (Roy and
    Vetterli 2007). The shares are fractions of the trace. All three are None where imported files
    have no eigenvalues. `orthogonality_error` is the largest over the matrices.
    """

    dim: int
    effective_rank: float | None
    top_1_share: float | None
    top_8_share: float | None
    orthogonality_error: float
    clip_ratios: list[float]
    """Of each KV head."""
    feedback: float | None = None
    """The share of nearest codes' squared errors, in the metric of the factors, that error feedback
    is expected to leave: the mean over heads. None without factors."""
    bits: float | None = None
    """Bits of a channel, scales not counted, that a budget gives. None without one."""


@dataclass(frozen=True)
class LayerSpectra:
    """One cached layer. `layer` is its index among all layers of the model. Where one side is
    read as both, key and value are the same."""

    layer: int
    kv_heads: int
    key: SideSpectrum
    value: SideSpectrum


def summarize(artifact: Artifact) -> list[LayerSpectra]:
    """One summary per cached layer, in order. Raises `RotationZooError` for a damaged file."""
    summaries = []
    for layer in cached_layers(artifact.geometry):
        rotations = artifact.rotations[layer.index]
        sides = _summarize_side(rotations.key), _summarize_side(rotations.value)
        summaries.append(LayerSpectra(layer.index, layer.kv_heads, *sides))
    return summaries


def _summarize_side(rotation: Rotation) -> SideSpectrum:
    rank = top_1 = top_8 = feedback = bits = None
    if rotation.eigenvalues is not None:
        # Rounding can leave tiny negative eigenvalues.
        shares = rotation.eigenvalues.double().clamp(min=0)
        # The trace is 0 in a layer whose activations are all 0. The clamp avoids dividing by it.
        shares /= shares.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
        rank = torch.special.entr(shares).sum(-1).exp().mean().item()
        top_1, top_8 = (strongest(shares, top).sum(-1).mean().item() for top in (1, 8))
    if rotation.feedback is not None:
        feedback = remaining_share(rotation.feedback).mean().item()
    if rotation.fine_channels is not None:
        bits = 2 + rotation.fine_channels.item() / rotation.dim
    error, clip = orthogonality_error(rotation.matrix), rotation.clip.tolist()
    return SideSpectrum(rotation.dim, rank, top_1, top_8, error, clip, feedback, bits)
