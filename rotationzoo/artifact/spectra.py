"""An artifact layer by layer: how concentrated each statistic is, and how exact each rotation."""

from dataclasses import dataclass

import torch

from rotationzoo.artifact.store import Artifact
from rotationzoo.linalg.compositions import orthogonality_error, strongest
from rotationzoo.model.geometry import cached_layers
from rotationzoo.rotations import Rotation

TOP = 8  # directions whose share of the trace is shown


@dataclass(frozen=True)
class SideSpectrum:
    """Means over the matrices of one side of a layer. `effective_rank` is the exponential of the
    entropy of the normalised eigenvalues (Roy and Vetterli 2007); the shares are parts of the
    trace. None where imported files have no eigenvalues."""

    dim: int
    effective_rank: float | None
    top_1_share: float | None
    top_8_share: float | None
    orthogonality_error: float


@dataclass(frozen=True)
class LayerSummary:
    """A cached layer; `layer` is its index over all layers of the model."""

    layer: int
    kv_heads: int
    key: SideSpectrum
    value: SideSpectrum


def summarize(artifact: Artifact) -> list[LayerSummary]:
    """One entry per cached layer, in order. Raises `RotationZooError` for a damaged file."""
    summaries = []
    for layer in cached_layers(artifact.geometry):
        rotations = artifact.rotations[layer.index]
        summary = LayerSummary(
            layer.index,
            layer.kv_heads,
            _summarize_side(rotations.key),
            _summarize_side(rotations.value),
        )
        summaries.append(summary)
    return summaries


def _summarize_side(rotation: Rotation) -> SideSpectrum:
    error = orthogonality_error(rotation.matrix)
    if rotation.eigenvalues is None:
        return SideSpectrum(rotation.dim, None, None, None, error)
    shares = rotation.eigenvalues.double().clamp(min=0)
    # The trace is 0 where all that a model computes is 0.
    trace = shares.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    shares = shares / trace
    return SideSpectrum(
        dim=rotation.dim,
        effective_rank=torch.special.entr(shares).sum(-1).exp().mean().item(),
        top_1_share=strongest(shares, 1).mean().item(),
        top_8_share=strongest(shares, TOP).sum(-1).mean().item(),
        orthogonality_error=error,
    )
