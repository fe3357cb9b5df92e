"""How RoPE turns the channels of a layer's keys, and their mean before it.

A mean of keys before RoPE is turned to each position by it. After RoPE only the slow channels have
a mean of their own; what the fast ones share varies with the position, and is lost to a mean.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from rotationzoo.codec.turned import angles
from rotationzoo.geometry import Geometry
from rotationzoo.model.prediction import run_decoder
from rotationzoo.recipe.rope import position_count, scaling_of

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
