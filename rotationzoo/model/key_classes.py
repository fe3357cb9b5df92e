"""Which key channels share a factor, in three entries of a layer's geometry: RoPE pairs, and heads
that share the weight of a norm.

A factor of a key channel can be folded into the weights before RoPE only if both channels of a RoPE
pair have it. Where heads share the weight of a norm, they share the factors too.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch

from rotationzoo.errors import UnsupportedModel
from rotationzoo.model.geometry import Geometry, Layer


def key_classes(layer: Layer) -> torch.Tensor | None:
    """The class of each key channel, `[KV heads, D_k]` int64: the number, counted through all
    heads, of the first channel that shares its factor.

    Neighbours are paired if the distance is 1, as in interleaved RoPE; otherwise channel j, for j
    below `rope_pairs`, goes with `j + rope_distance`. None where the geometry does not say it, or
    says it of channels that a head does not have.
    """
    pairs, distance = layer.rope_pairs, layer.rope_distance
    if pairs is None or distance is None or layer.shared_norm is None:
        return None
    step = 2 if distance == 1 else 1
    overlap = pairs > distance and distance != 1  # some second channel would be a first one, too
    if overlap or step * pairs > layer.key_dim or pairs + distance > layer.key_dim:
        return None
    channels, firsts = torch.arange(layer.key_dim), step * torch.arange(pairs)
    channels[firsts + distance] = firsts
    width = 0 if layer.shared_norm else layer.key_dim
    return width * torch.arange(layer.kv_heads)[:, None] + channels


def with_key_classes(geometry: Geometry, classes: Mapping[int, torch.Tensor]) -> Geometry:
    """The geometry with `rope_pairs`, `rope_distance` and `shared_norm` of every layer.

    - `classes`: layer with a cache -> `[KV heads, D_k]`, as in `KeyScales.classes`.

    Raises `UnsupportedModel` for classes that these three do not describe.
    """
    described = []
    for layer in geometry:
        firsts = _first_channels(classes[layer.owner])
        paired = (firsts[0] != torch.arange(layer.key_dim)).nonzero()[:, 0]
        distances = paired - firsts[0, paired]
        layer = replace(
            layer,
            rope_pairs=len(paired),
            rope_distance=int(distances[0]) if len(paired) else 0,
            shared_norm=bool((firsts[1:] < layer.key_dim).any()),
        )
        again = key_classes(layer)
        if again is None or not torch.equal(again, firsts):
            raise UnsupportedModel(
                f"layer {layer.owner} of the model has key channels that share factors in no known "
                "pattern"
            )
        described.append(layer)
    return described


def _first_channels(classes: torch.Tensor) -> torch.Tensor:
    """The same classes with the numbers that `key_classes` gives them."""
    _, numbers = classes.flatten().unique(return_inverse=True)
    channels = torch.arange(len(numbers))
    firsts = channels.scatter_reduce(0, numbers, channels, "amin", include_self=False)
    return firsts[numbers].view(classes.shape)
