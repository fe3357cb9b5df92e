"""Whole models with a 2-bit cache, simulated or real: their rotations, what they read call by call,
and how far two of them are apart."""

from dataclasses import replace

import torch

from rotationzoo.artifact.fit import fit
from rotationzoo.cache.rotated import RotatedCache
from rotationzoo.codec.rotated import RotatedCodec
from rotationzoo.codec.settings import CacheSettings
from rotationzoo.codec.windows import CacheLayout
from rotationzoo.linalg.transform_coding import decorrelate, share_bits
from rotationzoo.model.geometry import geometry_of
from rotationzoo.recipe.loading import PRESETS
from rotationzoo.rotations import Rotations
from rotationzoo.simulation.simulated import Simulation
from support.float64 import to_float64


def random_arm(model) -> RotatedCodec:
    """An arm with rotations that need no data, by which rows are rotated in float64."""
    return RotatedCodec(to_float64(fit(None, PRESETS["random"], geometry_of(model))))


def with_means(rotations: Rotations) -> Rotations:
    """The same rotations with means of keys and values."""
    generator = torch.Generator().manual_seed(3)

    def center(_, __, rotation):
        mean = torch.randn(len(rotation.clip), rotation.dim, generator=generator)
        return replace(rotation, mean=mean)

    return rotations.replace(center)


def with_transforms(rotations: Rotations) -> Rotations:
    """The same rotations with transform coding of rows of independent channels, in 2.5 bits an
    element; the last head of values gets none."""
    generator, transforms = torch.Generator().manual_seed(8), {}
    for layer, side, rotation in rotations.each():
        heads, dim = len(rotation.clip), rotation.dim
        weights = torch.linspace(0, -6, dim).exp()
        drawn = torch.randn(heads, dim, dim, generator=generator) * weights
        metric = drawn @ drawn.mT
        if side == "value":
            metric[-1] *= 1e-9
        transforms[layer, side] = decorrelate(torch.eye(dim).expand(heads, -1, -1), metric)
    shares = share_bits([each.costs for each in transforms.values()], 2.5)
    widths = dict(zip(transforms, shares, strict=True))

    def add(layer, side, rotation):
        made = transforms[layer, side]
        return replace(
            rotation,
            transform=made.forward.float(),
            deviations=made.deviations.float(),
            costs=made.costs,
            widths=widths[layer, side],
        )

    return rotations.replace(add)


def cache_for(model, arm: RotatedCodec, windows: CacheLayout, **settings) -> RotatedCache:
    """An empty cache of what an arm stores, in blocks of 8 tokens."""
    return RotatedCache(CacheSettings(arm, windows, **{"block": 8, **settings}), model)


def simulation_of(model, arm: RotatedCodec, windows: CacheLayout) -> Simulation:
    """The simulation of all layers of a model."""
    geometry = geometry_of(model)
    return Simulation(arm, windows, geometry, {layer.index for layer in geometry})


@torch.no_grad()
def read_whole(model, ids: torch.Tensor) -> torch.Tensor:
    """Logits of a model that reads its rows in one call, with no cache."""
    return model(input_ids=ids, use_cache=False).logits


def simulate(model, arm: RotatedCodec, windows: CacheLayout, ids: torch.Tensor) -> torch.Tensor:
    """Logits of a model whose cache is simulated."""
    with simulation_of(model, arm, windows).running(model):
        return read_whole(model, ids)


@torch.no_grad()
def read_in_calls(model, cache, ids: torch.Tensor, calls: int | list[int]) -> torch.Tensor:
    """Logits of a model that reads so many tokens a call."""
    logits = []
    for part in ids.split(calls, dim=1):
        start = cache.get_seq_length()
        positions = torch.arange(start, start + part.shape[1]).expand(len(ids), -1)
        options = {"position_ids": positions, "past_key_values": cache, "use_cache": True}
        logits.append(model(input_ids=part, **options).logits)
    return torch.cat(logits, dim=1)


def generate(model, cache, ids: torch.Tensor, tokens: int, **options) -> torch.Tensor:
    """The greedy text of so many tokens, with the prompt before it."""
    settings = {"do_sample": False, "pad_token_id": 0, "past_key_values": cache}
    settings |= {"min_new_tokens": tokens, "max_new_tokens": tokens}
    settings["attention_mask"] = torch.ones_like(ids)
    return model.generate(ids, **settings | options)


def distance(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, of the largest number that is expected."""
    return ((logits - expected).abs().max() / expected.abs().max()).item()
