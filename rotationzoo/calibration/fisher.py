"""The Fisher information of what a cache stores: what an error of a key or a value costs, in nats.

If tokens are drawn from the model's own predictions, and g is the gradient of their log probability
at a stored row, an error e of that row makes predictions diverge by about `e E[g^T g] e / 2`
(Amari 1998). Rows are read as a server reads them: exact in the windows, and stored elsewhere. So
one metric holds what each layer, KV head and channel is worth, and nothing else weighs them.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from transformers import PreTrainedModel

from rotationzoo.codec.int2 import Format
from rotationzoo.codec.windows import CacheLayout
from rotationzoo.geometry import Geometry
from rotationzoo.linalg.moments import Moment
from rotationzoo.model.prediction import HiddenStates, run_decoder
from rotationzoo.progress import Progress, silent
from rotationzoo.simulation.simulated import Simulation

Place = tuple[int, str]
"""A layer and a side."""
BLOCK = 256
"""Predictions whose logits are held at a time."""


@dataclass(frozen=True)
class Scored:
    """Token ids `[T]`, and the positions whose predictions count."""

    ids: torch.Tensor
    positions: Sequence[int]


@dataclass
class _Probe:
    """A codec that stores rows as they are, and keeps zeros that were added to them: the gradient
    at these is the gradient at what is read of the rows."""

    zeros: dict[Place, torch.Tensor] = field(default_factory=dict)
    token_group: int = 1

    def keep_exact(self, rows: torch.Tensor, layer: int, side: str) -> torch.Tensor:
        return rows

    def fake_quantize(
        self, rows: torch.Tensor, layer: int, side: str, format: Format
    ) -> torch.Tensor:
        # Layers that read another one's cache share its zeros.
        zeros = self.zeros.setdefault((layer, side), torch.zeros_like(rows, requires_grad=True))
        return rows + zeros

    def stored_bits(self, layer: int, side: str, dim: int, format: Format) -> float:
        return 16.0


def collect_fisher(
    model: PreTrainedModel,
    geometry: Geometry,
    texts: Sequence[Scored],
    cache: CacheLayout,
    draws: int,
    progress: Progress = silent,
) -> dict[Place, torch.Tensor]:
    """The Fisher information `[KV heads, D, D]`, float64 on the CPU, of a predicted token: tokens
    are drawn `draws` times at all positions of each text. Parameters get no gradients."""
    grads = [parameter.requires_grad for parameter in model.parameters()]
    model.requires_grad_(False)
    sums: dict[Place, Moment] = {}
    try:
        for number, text in enumerate(texts):
            progress("measuring what errors cost", number, len(texts))
            _add_text(model, geometry, text, cache, draws, sums)
    finally:
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            parameter.requires_grad_(grad)
    count = draws * sum(len(text.positions) for text in texts)
    found = {}
    for place, its in sums.items():
        moment = its.second.cpu() / count
        found[place] = (moment + moment.mT) / 2
    return found


@torch.enable_grad()
def _add_text(
    model: PreTrainedModel,
    geometry: Geometry,
    text: Scored,
    cache: CacheLayout,
    draws: int,
    sums: dict[Place, Moment],
) -> None:
    """Add the gradients of one text to the sums."""
    probe, layers = _Probe(), {layer.index for layer in geometry}
    with Simulation(probe, cache, geometry, layers).running(model):
        states = run_decoder(model, text.ids[None])
    last = states.output.last_hidden_state
    for draw in range(draws):
        wanted = _gradient_of_draw(states, text.positions)
        zeros = [*probe.zeros.values()]
        found = torch.autograd.grad(last, zeros, wanted, retain_graph=draw + 1 < draws)
        for place, gradient in zip(probe.zeros, found, strict=True):
            if place not in sums:
                sums[place] = Moment.zeros(gradient.shape[1], gradient.shape[3], gradient.device)
            sums[place].add(gradient[0])


def _gradient_of_draw(states: HiddenStates, positions: Sequence[int]) -> torch.Tensor:
    """The gradient, at the last hidden states, of the log probability of tokens that are drawn at
    these positions."""
    output = copy.copy(states.output)
    output["last_hidden_state"] = leaf = states.output.last_hidden_state.detach().requires_grad_()
    copied = replace(states, output=output)
    for first in range(0, len(positions), BLOCK):
        logits = copied.logits(list(positions[first : first + BLOCK]))[0]
        logs = logits.float().log_softmax(-1)
        drawn = torch.multinomial(logs.detach().exp(), 1)
        logs.gather(1, drawn).sum().backward()
    gradient: torch.Tensor | None = leaf.grad
    assert gradient is not None, "a text without positions has no gradient"
    return gradient


def mix(
    metrics: Sequence[Mapping[Place, torch.Tensor]], covariances: Mapping[Place, torch.Tensor]
) -> dict[Place, torch.Tensor]:
    """The sum of several metrics, each as a share of what is lost by it if nothing is stored of
    rows with these covariances, all `[KV heads, D, D]`."""
    mixed: dict[Place, torch.Tensor] = {}
    for its in metrics:
        lost = sum((its[place] * covariance).sum() for place, covariance in covariances.items())
        for place in covariances:
            mixed[place] = mixed.get(place, 0) + its[place] / lost
    return mixed
