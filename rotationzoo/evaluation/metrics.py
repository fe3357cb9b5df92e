"""The figures that `evaluate` reports of texts: perplexity, attention KL and output error, with
their standard errors."""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

from rotationzoo.artifact import measured
from rotationzoo.linalg.paired import weighted_mean
from rotationzoo.simulation.simulated import Observers

COMPARED_TOKENS = 8192
"""Tokens of outputs that are compared at a time: float32 copies of long rows take gigabytes."""


@dataclass(frozen=True)
class Buckets:
    """Consecutive ranges of positions, each from one of the ascending edges to just before the
    next."""

    edges: tuple[int, ...]

    @classmethod
    def between(cls, start: int, length: int) -> "Buckets":
        """Buckets that cover `start` to `length`, with the powers of two in between as edges."""
        exponents = range(start.bit_length(), (length - 1).bit_length())
        return cls((start, *(1 << exponent for exponent in exponents), length))

    @property
    def start(self) -> int:
        """The first position."""
        return self.edges[0]

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """For each bucket, its first position and the position after its last."""
        return list(pairwise(self.edges))

    def one_hot(self, positions: torch.Tensor) -> torch.Tensor:
        """Membership `[P, buckets]`, float64: 1 where a position of `[P]` lies in the bucket."""
        edges = torch.tensor(self.edges)
        inside = (positions[:, None] >= edges[:-1]) & (positions[:, None] < edges[1:])
        return inside.double()


class Metrics:
    """Sums of what one arm, or the exact model, did on every text.

    Sums have shape `[texts, buckets]`, once per layer for what is measured by layer. Standard
    errors are those of paired differences over texts, weighted by their numbers of tokens.
    """

    def __init__(self, buckets: Buckets, layers: list[int]):
        self.buckets, self.layers = buckets, layers
        self._parts: defaultdict[str, list[torch.Tensor]] = defaultdict(list)
        """All sums by name, each with one part `[B, ...]` per batch of texts."""

    @property
    def observers(self) -> Observers:
        """The methods that add what a simulation reports."""
        return Observers(self.add_output, self.add_kl)

    def add_losses(self, losses: torch.Tensor) -> None:
        """Add negative log likelihoods `[B, P]` of the positions from `buckets.start` on."""
        member = self._member_from_start(losses.shape[1])
        # Sum in float64: over a long text, arms may differ by less than float32 rounding.
        self._parts["loss"].append(losses.double().cpu() @ member)
        self._parts["count"].append(torch.ones(losses.shape, dtype=torch.float64) @ member)

    def add_output(self, layer: int, output: torch.Tensor, exact: torch.Tensor) -> None:
        """Add one attention block's outputs `[B, T, hidden]`: the arm's and the exact ones."""
        start = self.buckets.start
        errors, norms = zip(*_squares(output[:, start:], exact[:, start:]), strict=True)
        member = self._member_from_start(output.shape[1] - start)
        self._parts[f"error {layer}"].append(torch.cat(errors, dim=1).cpu() @ member)
        self._parts[f"norm {layer}"].append(torch.cat(norms, dim=1).cpu() @ member)

    def add_kl(self, layer: int, divergence: torch.Tensor, positions: torch.Tensor) -> None:
        """Add the attention KL `[B, Q]` of the queries at `positions` `[Q]`."""
        member = self.buckets.one_hot(positions)
        self._parts[f"divergence {layer}"].append(divergence.double().cpu() @ member)
        # All layers sample the same queries, so counting them in the first layer is enough.
        if layer == self.layers[0]:
            self._parts["sampled"].append(member.sum(0).expand(len(divergence), -1))

    @property
    def tokens(self) -> int:
        """The number of tokens that have a loss."""
        return int(torch.cat(self._parts["count"]).sum())

    def measure_exact(self) -> measured.ExactCosts:
        """The report on the exact model, which has only losses."""
        loss, count = torch.cat(self._parts["loss"]), torch.cat(self._parts["count"])
        by_length = []
        for i, (low, high) in enumerate(self.buckets.ranges):
            perplexity = _perplexity(loss[:, i].sum(), count[:, i].sum())
            by_length.append(measured.RangePerplexity(from_=low, to=high, perplexity=perplexity))
        return measured.ExactCosts(
            text_tokens=count.sum(1).long().tolist(),
            perplexity=_perplexity(loss.sum(), count.sum()),
            by_length=by_length,
            text_losses=self._text_losses(),
        )

    def measure_arm(self, exact: "Metrics") -> measured.ArmCosts:
        """The report on an arm, compared with the exact model on the same texts."""
        by_length = []
        for i, (low, high) in enumerate(self.buckets.ranges):
            measures = dict(self._measure(exact, slice(i, i + 1)))
            by_length.append(measured.BucketMeasures(from_=low, to=high, **measures))
        return measured.ArmCosts(
            **dict(self._measure(exact, slice(None))),
            by_length=by_length,
            by_layer=[self._measure_layer(layer) for layer in self.layers],
            text_losses=self._text_losses(),
        )

    def _measure(self, exact: "Metrics", buckets: slice) -> measured.Measures:
        """The measures over all texts, restricted to some of the buckets."""
        loss, exact_loss = self._sum("loss", buckets), exact._sum("loss", buckets)
        count = self._sum("count", buckets)
        # 0 / 0 for a text that ends before these buckets. Its weight is 0, so it is left out.
        extra, extra_error = weighted_mean((loss - exact_loss) / count, count)
        increase = math.expm1(extra)
        # To first order, the standard error of exp(x) - 1 is exp(x) times that of x.
        increase_error = None if extra_error is None else (1 + increase) * extra_error
        # Each text's relative RMS error of the block outputs, averaged over layers: `[texts]`.
        squares = self._sum_layers("error", buckets) / self._sum_layers("norm", buckets)
        output_error, output_error_error = weighted_mean(squares.sqrt().mean(0), count)
        kl, kl_error = None, None
        if self._parts["sampled"] and (sampled := self._sum("sampled", buckets)).any():
            divergence = self._sum_layers("divergence", buckets).mean(0)
            kl, kl_error = weighted_mean(divergence / sampled, sampled)
        return measured.Measures(
            perplexity=_perplexity(loss.sum(), count.sum()),
            perplexity_increase=increase,
            attention_kl=kl,
            output_error=output_error,
            standard_error={
                "perplexity_increase": increase_error,
                "attention_kl": kl_error,
                "output_error": output_error_error,
            },
        )

    def _measure_layer(self, layer: int) -> measured.LayerMeasures:
        # No standard error is reported by layer, so all texts are summed before the root is taken.
        error = torch.cat(self._parts[f"error {layer}"]).sum().item()
        norm = torch.cat(self._parts[f"norm {layer}"]).sum().item()
        kl = None
        if self._parts["sampled"]:
            total = torch.cat(self._parts[f"divergence {layer}"]).sum()
            kl = (total / torch.cat(self._parts["sampled"]).sum()).item()
        return measured.LayerMeasures(
            layer=layer,
            output_error=(error / norm) ** 0.5,
            attention_kl=kl,
        )

    def _text_losses(self) -> list[float]:
        """The mean negative log likelihood of each text's tokens, in nats."""
        return (self._sum("loss") / self._sum("count")).tolist()

    def _sum(self, name: str, buckets: slice = slice(None)) -> torch.Tensor:
        """Sums `[texts]` over some buckets, or all."""
        return torch.cat(self._parts[name])[:, buckets].sum(1)

    def _sum_layers(self, name: str, buckets: slice) -> torch.Tensor:
        """Sums of each layer, `[layers, texts]`, over some buckets."""
        return torch.stack([self._sum(f"{name} {layer}", buckets) for layer in self.layers])

    def _member_from_start(self, count: int) -> torch.Tensor:
        """Membership `[count, buckets]` of the first `count` positions from the start on."""
        start = self.buckets.start
        return self.buckets.one_hot(torch.arange(start, start + count))


def _squares(
    output: torch.Tensor, exact: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """For blocks of tokens of outputs `[B, T, ..., N]`, the sums over N, in float64, of the squares
    of the arm's errors and of the exact outputs."""
    parts = output.split(COMPARED_TOKENS, dim=1), exact.split(COMPARED_TOKENS, dim=1)
    for part, exact_part in zip(*parts, strict=True):
        exact_part = exact_part.float()
        difference = part.float() - exact_part
        yield difference.square_().sum(-1).double(), exact_part.square().sum(-1).double()


def _perplexity(loss: torch.Tensor, count: torch.Tensor) -> float:
    return math.exp((loss / count).item())
