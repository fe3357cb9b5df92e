"""What an artifact found, layer by layer: how concentrated each statistic is, and how exact each rotation."""

from dataclasses import dataclass

import torch

from rotationzoo.artifact import Artifact
from rotationzoo.geometry import cached_layers, geometry_from_json
from rotationzoo.rotation import orthogonality_error

TOP = 8  # directions whose share of the trace is shown


@dataclass(frozen=True)
class Side:
    """Means over the matrices of one side of a layer. `effective_rank` is the exponential of the entropy of the normalised
    eigenvalues (Roy and Vetterli 2007); the shares are parts of the trace. None where imported files have no eigenvalues."""

    dim: int
    effective_rank: float | None
    top_1_share: float | None
    top_8_share: float | None
    orthogonality_error: float


@dataclass(frozen=True)
class LayerSummary:
    layer: int
    kv_heads: int
    key: Side
    value: Side


def summarize(artifact: Artifact) -> list[LayerSummary]:
    """One entry per cached layer, in order. Raises `RotationZooError` for a damaged file."""
    tensors = artifact.rotations()
    return [
        LayerSummary(layer.index, layer.kv_heads, *(_side(tensors, layer.index, side) for side in ("key", "value")))
        for layer in cached_layers(geometry_from_json(artifact.manifest["geometry"]))
    ]


def _side(tensors: dict[str, torch.Tensor], layer: int, side: str) -> Side:
    rotation = tensors[f"layers.{layer}.{side}.rotation"]
    error = orthogonality_error(rotation)
    eigenvalues = tensors.get(f"layers.{layer}.{side}.eigenvalues")
    if eigenvalues is None:
        return Side(rotation.shape[-1], None, None, None, error)
    shares = eigenvalues.double().clamp(min=0)
    shares = shares / shares.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)  # of a model of zeros, too
    return Side(
        dim=rotation.shape[-1],
        effective_rank=torch.special.entr(shares).sum(-1).exp().mean().item(),
        top_1_share=shares[..., -1].mean().item(),
        top_8_share=shares[..., -TOP:].sum(-1).mean().item(),
        orthogonality_error=error,
    )
