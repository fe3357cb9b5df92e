"""Which key channels RoPE mixes, and whether the heads of a layer share a norm: measured on the
model, with no list of models.

A factor of a key channel can be folded into the weights before RoPE only if both channels of a RoPE
pair have it. Where heads share the weight of a norm, they share the factors too.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from rotationzoo.errors import UnsupportedModel
from rotationzoo.model.attention_probe import AttentionProbe, Vectors
from rotationzoo.model.geometry import Geometry, Layer

# Relative change of a channel between positions. One that RoPE leaves alone does not change at all;
# 4e-5 was measured for the slowest pair of tiny models with 64 positions, 8e-4 for wide heads.
_MOVED = 1e-6
# Squared correlation of what a channel became with its partner, given the channel: above .99998 for
# partners, at most .79 for the best of 255 other channels of a single head.
_PARTNER = 0.99
# Relative spread, over draws, of what scaled projections make of a channel: at most 5e-8 without a
# norm, at least .02 with one.
_CONSTANT = 1e-4


@torch.no_grad()
def with_rope_pairs(model: PreTrainedModel, geometry: Geometry) -> Geometry:
    """The geometry of a loaded model with `rope_pairs`, `rope_distance` and `shared_norm` of every
    layer.

    Layers that share a cache share the factors of its keys, so a norm in one reader counts for all.
    Raises `UnsupportedModel` where RoPE mixes channels in another way than in pairs of neighbours
    or of two halves.
    """
    probe = AttentionProbe(model)
    plain, scaled = probe.run(scale=False), probe.run(scale=True)
    shared: set[int] = set()
    for layer in geometry:
        if _shares_norm(layer, probe.modules[layer.index], plain, scaled):
            shared.add(layer.owner)
    measured = []
    for layer in geometry:
        _, keys = plain[layer.owner]
        pairs, distance = _describe(_find_partners(keys), layer.owner)
        by_heads = layer.owner in shared
        measured.append(
            replace(layer, rope_pairs=pairs, rope_distance=distance, shared_norm=by_heads)
        )
    return measured


def _shares_norm(layer: Layer, module: torch.nn.Module, plain: Vectors, scaled: Vectors) -> bool:
    """Whether queries or keys of a layer pass a norm whose weight does not tell heads apart."""
    sides = [(0, layer.query_heads)]
    if layer.owner == layer.index:  # other layers make no keys
        sides.append((1, layer.kv_heads))
    sizes = {parameter.numel() for parameter in _norm_weights(module)}
    for side, heads in sides:
        # At the first position, where RoPE turns nothing.
        before, after = (vectors[layer.index][side][:, :, 0] for vectors in (plain, scaled))
        ratios = after / before
        spread = ratios.std(0) / ratios.mean(0).abs()
        by_head = heads * layer.key_dim in sizes
        if spread.nanmedian() > _CONSTANT and heads > 1 and not by_head:
            return True
    return False


def _norm_weights(module: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """The parameters of an attention module that are in no linear map."""
    for part in module.modules():
        if not hasattr(part, "in_features"):
            yield from part.parameters(recurse=False)


def _find_partners(keys: torch.Tensor) -> list[int]:
    """The partner of each channel, or the channel itself where no position changes it.

    `keys` are `[N, H, T, D]`: rows that are equal before RoPE, at several positions, the first of
    which has no turn. RoPE turns a pair: `k_j(t) = cos k_j(0) - sin k_p(0)`. What is left of
    `k_j(t)` without its part along `k_j(0)` therefore lies along what is left of `k_p(0)`.
    """
    first, *others = keys.flatten(0, 1).unbind(1)
    partners = list(range(keys.shape[-1]))
    for turned in others:
        for channel, partner in _match(first, turned).items():
            partners[channel], partners[partner] = partner, channel
    return partners


def _match(first: torch.Tensor, turned: torch.Tensor) -> dict[int, int]:
    """The partners of the channels that differ between rows `[N, D]` at two positions.

    A channel whose change no other channel explains is matched with itself.
    """
    along = (turned * first).sum(0) / first.square().sum(0)
    change = turned - along * first
    moved = change.norm(dim=0) > _MOVED * turned.norm(dim=0)
    matches = {}
    for channel in moved.nonzero()[:, 0].tolist():
        axis = first[:, channel] / first[:, channel].norm()
        rest = first - axis[:, None] * (axis @ first)
        rest[:, channel] = 0
        explained = (change[:, channel] @ rest).square()
        total = change[:, channel].square().sum() * rest.square().sum(0)
        correlation = explained / total.clamp(min=torch.finfo(torch.float64).tiny)
        best = int(correlation.argmax())
        matches[channel] = best if correlation[best] > _PARTNER else channel
    return matches


def _describe(partners: list[int], layer: int) -> tuple[int, int]:
    """The number of pairs and the distance of their channels. Raises `UnsupportedModel` for another
    pattern."""
    firsts = [channel for channel, partner in enumerate(partners) if partner > channel]
    if not firsts:
        return 0, 0
    pairs, distance = len(firsts), partners[firsts[0]] - firsts[0]
    if distance > 1 and 2 * distance == len(partners):
        # RoPE pairs all channels and turns only the first ones, by angles that differ from zero.
        return distance, distance
    if partner_channels(len(partners), pairs, distance) != partners:
        raise UnsupportedModel(
            f"RoPE mixes the key channels of layer {layer} in pairs of no known pattern",
            hint="set equalize to false in the recipe",
        )
    return pairs, distance


def partner_channels(dim: int, pairs: int, distance: int) -> list[int]:
    """The channel that RoPE mixes each of `dim` channels with; its own number where there is none.

    Neighbours are paired if the distance is 1, as in interleaved RoPE; otherwise channel j, for j
    below `pairs`, goes with `j + distance`.
    """
    partners = list(range(dim))
    step = 2 if distance == 1 else 1
    for channel in range(0, step * pairs, step):
        partners[channel], partners[channel + distance] = channel + distance, channel
    return partners
