"""How RoPE turns the channels of a layer's keys, and their mean before it.

A mean of keys before RoPE is turned to each position by it. After RoPE only the slow channels have
a mean of their own; what the fast ones share varies with the position, and is lost to a mean.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from rotationzoo.geometry import Geometry, cached_layers
from rotationzoo.linalg.moments import TURNED, Moment, Statistics
from rotationzoo.model.prediction import run_decoder
from rotationzoo.recipe import Recipe
from rotationzoo.recipe.rope import position_count, scaling_of
from rotationzoo.rotations import Rotation, Rotations, angles

_POSITIONS = 256  # that angles are read at
_CLOSE = 1e-3  # of cosines in float32; 1e-5 was measured
_CHANGING = ("dynamic", "longrope")  # their angles depend on the length of a request


@dataclass(frozen=True)
class Turning:
    """RoPE of a layer. A channel d of a key at position p becomes `x_d cos(f_d p) + s_d x_o sin(f_d
    p)`, where o is the other channel of its pair."""

    frequencies: torch.Tensor
    """`[D]` float64: radians a position. 0 for channels that are not turned."""
    other: torch.Tensor
    """`[D]` int64: the other channel of each one's pair, or itself."""
    sign: torch.Tensor
    """`[D]` float64: -1 for the first channel of a pair, and 1 for the second."""

    def turn_back(self, rows: torch.Tensor) -> torch.Tensor:
        """Keys `[..., T, D]` of the positions from 0 on as they were before RoPE, in their type."""
        cosine, sine = angles(self.frequencies, 0, rows.shape[-2])
        other = rows[..., self.other.to(rows.device)] * (sine * self.sign).to(rows)
        return rows * cosine.to(rows) - other

    def amplitudes(self, mean: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """What a mean `[H, D]` before RoPE is at each position: `Rotation.turned_mean`
        `[H, 3, D]`, whose own mean over the positions from `start` up to `stop` is 0."""
        turned = torch.stack([mean, mean[:, self.other] * self.sign], dim=1)
        phases = torch.stack(angles(self.frequencies, start, stop)).mean(1)
        return torch.cat([turned, -(turned * phases).sum(1, keepdim=True)], dim=1)

    def spread(self, moment: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """The second moment `[H, D, D]` of keys that had this one before RoPE at all positions from
        `start` up to `stop`."""
        cosine, sine = angles(self.frequencies, start, stop)
        sine = sine * self.sign
        second = moment[:, self.other]
        total = (cosine.mT @ cosine) * moment + (sine.mT @ sine) * second[..., self.other]
        total = total + (cosine.mT @ sine) * moment[..., self.other] + (sine.mT @ cosine) * second
        return total / (stop - start)


def find_turnings(model: PreTrainedModel, geometry: Geometry) -> dict[int, Turning]:
    """How each layer turns its keys, by the angles that the model gives its attention. Layers of
    other forms of RoPE, or of one that depends on the length of a request, are left out."""
    if str(scaling_of(model.config)).split(":")[0] in _CHANGING:
        return {}
    dims = {layer.index: layer.key_dim for layer in geometry}
    found: dict[int, Turning] = {}
    unrounded: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # cosines, sines `[B, T, D]`

    def compute(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        # Models round the angles to their own type, and a frequency needs more digits.
        if isinstance(output, tuple):
            first = [states.float() for states in args[:1]]
            named = {**kwargs, "x": kwargs["x"].float()} if "x" in kwargs else kwargs
            unrounded[id(output[0])] = module.forward(*first, *args[1:], **named)

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        given, layer = kwargs.get("position_embeddings"), module.layer_idx
        # M-RoPE has a further axis.
        if layer in dims and isinstance(given, tuple) and given[0].dim() == 3:
            pair = unrounded.get(id(given[0]), given)
            cosine, sine = (each[0].double().cpu() for each in pair)
            turning = _find_turning(cosine, sine, dims[layer])
            if turning is not None:
                found[layer] = turning

    count = min(_POSITIONS, position_count(model.config) or _POSITIONS)
    with ExitStack() as hooks, torch.no_grad():
        for module in model.modules():
            if hasattr(module, "layer_idx"):
                hooks.enter_context(module.register_forward_pre_hook(note, with_kwargs=True))
            if any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False)):
                hooks.enter_context(module.register_forward_hook(compute, with_kwargs=True))
        run_decoder(model, torch.zeros(1, count, dtype=torch.long))
    return found


def _find_turning(cosine: torch.Tensor, sine: torch.Tensor, dim: int) -> Turning | None:
    """The turning of a head of `dim` channels with these angles `[T, D or fewer]`; None where they
    are of neither form, or do not grow with the position. Their scale stays in the keys."""
    turned = cosine.shape[1]
    half, channel = turned // 2, torch.arange(dim)
    if torch.equal(cosine[:, :half], cosine[:, half:]):
        other, is_first = (channel + half) % turned, channel < half
    elif torch.equal(cosine[:, ::2], cosine[:, 1::2]):
        other, is_first = channel ^ 1, channel % 2 == 0
    else:
        return None
    frequencies = torch.zeros(dim, dtype=torch.float64)
    frequencies[:turned] = torch.atan2(sine[1], cosine[1])
    expected = angles(frequencies[:turned], 0, len(cosine))[0] * cosine[0]
    if not torch.allclose(cosine, expected, atol=_CLOSE):
        return None
    other = torch.where(channel < turned, other, channel)
    return Turning(frequencies, other, torch.where(is_first, -1.0, 1.0).double())


# ---- means before RoPE, at each position

Means = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""Layer -> `Rotation.turned_mean` and `Rotation.frequencies`."""


def turn_means(
    statistics: Statistics, geometry: Geometry, turnings: Mapping[int, Turning], recipe: Recipe
) -> tuple[Statistics, Means]:
    """The statistics with the moments of keys about their turned means in place of those before
    RoPE, and these means. They are 0 in a layer whose keys vary less about their mean alone.

    Keys before RoPE are taken to depend on no position, and rows to be of one length."""
    means: Means = {}
    start, stop = recipe.sink * recipe.exclude_sink, recipe.data.length
    found = {layer: dict(kinds) for layer, kinds in statistics.items()}
    for layer in cached_layers(geometry):
        if "key" not in layer.sides:
            continue
        kinds = found[layer.index]
        plain, before = _covariance(kinds["key"]), _covariance(kinds[TURNED])
        turned = torch.zeros(layer.kv_heads, 3, layer.key_dim, dtype=torch.float64)
        frequencies = torch.zeros(layer.key_dim, dtype=torch.float64)
        turning = turnings.get(layer.index)
        if turning is not None and _trace(before) < _trace(plain):
            mean = kinds[TURNED].mean.cpu()
            turned, frequencies = turning.amplitudes(mean, start, stop), turning.frequencies
            plain = turning.spread(before, start, stop)
        means[layer.index] = turned.float(), frequencies
        weight = kinds["key"].weight.cpu()
        nothing = torch.zeros_like(turned[:, 0])
        kinds[TURNED] = Moment(plain * weight[:, None, None], nothing, weight)
    return found, means


def add_turned_means(rotations: Rotations, means: Means) -> Rotations:
    """The rotations with turned means of keys."""

    def add_mean(layer: int, side: str, rotation: Rotation) -> Rotation:
        if side != "key" or layer not in means:
            return rotation
        turned, frequencies = means[layer]
        return replace(rotation, turned_mean=turned, frequencies=frequencies)

    return rotations.replace(add_mean)


def _covariance(moment: Moment) -> torch.Tensor:
    """`[H, D, D]`, on the CPU."""
    mean = moment.mean.cpu()
    return moment.second_moment.cpu() - mean[:, :, None] * mean[:, None]


def _trace(moment: torch.Tensor) -> float:
    return float(moment.diagonal(dim1=-2, dim2=-1).sum())
