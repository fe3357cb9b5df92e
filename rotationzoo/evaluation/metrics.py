"""The figures that `evaluate` reports of texts: perplexity, attention KL and output error, with
their standard errors."""

import math
from collections import defaultdict
from itertools import pairwise

import torch

from rotationzoo.artifact import measured
from rotationzoo.linalg.paired import weighted_mean
from rotationzoo.simulation.simulated import Observers

COMPARED_TOKENS = 8192
"""Tokens of outputs that are compared at a time: float32 copies of long rows take gigabytes."""


def bucket_edges(start: int, length: int) -> tuple[int, ...]:
    """The edges of buckets that cover the positions from `start` to `length`, with the powers of
    two in between as edges. Each goes from an edge to just before the next."""
    exponents = range(start.bit_length(), (length - 1).bit_length())
    return (start, *(1 << exponent for exponent in exponents), length)


def bucket_members(edges: tuple[int, ...], positions: torch.Tensor) -> torch.Tensor:
    """Membership `[P, buckets]`, float64: 1 where a position of `[P]` lies in the bucket."""
    bounds = torch.tensor(edges)
    inside = (positions[:, None] >= bounds[:-1]) & (positions[:, None] < bounds[1:])
    return inside.double()


class Metrics:
    """Sums of what one arm, or the exact model, did on every text.

    Sums have shape `[texts]`, once per layer for what is measured by layer; those of losses and of
    their tokens `[texts, buckets]`. Standard errors are those of paired differences over texts,
    weighted by their numbers of tokens.
    """

    def __init__(self, edges: tuple[int, ...], layers: list[int]):
        """`edges`: of buckets of positions."""
        self.edges, self.start, self.layers = edges, edges[0], layers
        self._parts: defaultdict[str, list[torch.Tensor]] = defaultdict(list)
        """All sums by name, each with one part `[B, ...]` per batch of texts."""

    @property
    def observers(self) -> Observers:
        """The methods that add what a simulation reports."""
        return Observers(self.add_output, self.add_kl)

    def add_losses(self, losses: torch.Tensor) -> None:
        """Add negative log likelihoods `[B, P]` of the positions from `start` on."""
        positions = torch.arange(self.start, self.start + losses.shape[1])
        member = bucket_members(self.edges, positions)
        # Sum in float64: over a long text, arms may differ by less than float32 rounding.
        self._parts["loss"].append(losses.double().cpu() @ member)
        self._parts["count"].append(member.sum(0).expand(len(losses), -1))

    def add_output(self, layer: int, output: torch.Tensor, exact: torch.Tensor) -> None:
        """Add one attention block's outputs `[B, T, hidden]`: the arm's and the exact ones."""
        compared = output[:, self.start :], exact[:, self.start :]
        parts = (rows.split(COMPARED_TOKENS, dim=1) for rows in compared)
        error, norm = torch.zeros(2, len(output), dtype=torch.float64)
        for part, exact_part in zip(*parts, strict=True):
            exact_part = exact_part.float()
            difference = part.float() - exact_part
            error += difference.square_().sum(-1).double().sum(1).cpu()
            norm += exact_part.square().sum(-1).double().sum(1).cpu()
        self._parts[f"error {layer}"].append(error)
        self._parts[f"norm {layer}"].append(norm)

    def add_kl(self, layer: int, divergence: torch.Tensor, positions: torch.Tensor) -> None:
        """Add the attention KL `[B, Q]` of the queries at `positions` `[Q]`."""
        self._parts[f"divergence {layer}"].append(divergence.double().cpu().sum(1))
        # All layers sample the same queries, so counting them in the first layer is enough.
        if layer == self.layers[0]:
            count = torch.full((len(divergence),), len(positions), dtype=torch.float64)
            self._parts["sampled"].append(count)

    @property
    def tokens(self) -> int:
        """The number of tokens that have a loss."""
        return int(self._all("count").sum())

    def measure_exact(self) -> measured.ExactCosts:
        """The report on the exact model, which has only losses."""
        loss, count = self._all("loss").sum(1), self._all("count").sum(1)
        return measured.ExactCosts(
            text_tokens=count.long().tolist(),
            perplexity=_perplexity(loss.sum(), count.sum()),
            text_losses=(loss / count).tolist(),
        )

    def measure_arm(self, exact: "Metrics") -> measured.ArmCosts:
        """The report on an arm, compared with the exact model on the same texts."""
        loss, buckets = self._all("loss"), self._all("count")
        extra, count = loss - exact._all("loss"), buckets.sum(1)
        mean, error = weighted_mean(extra.sum(1) / count, count)
        increase = math.expm1(mean)
        # To first order, the standard error of exp(x) - 1 is exp(x) times that of x.
        increase_error = None if error is None else (1 + increase) * error
        # Each text's relative RMS error of the block outputs, averaged over layers: `[texts]`.
        squares = self._by_layer("error") / self._by_layer("norm")
        output_error, output_error_error = weighted_mean(squares.sqrt().mean(0), count)
        kl, kl_error = None, None
        if self._parts["sampled"]:
            sampled = self._all("sampled")
            kl, kl_error = weighted_mean(self._by_layer("divergence").mean(0) / sampled, sampled)
        return measured.ArmCosts(
            perplexity=_perplexity(loss.sum(), count.sum()),
            perplexity_increase=increase,
            attention_kl=kl,
            output_error=output_error,
            standard_error={
                "perplexity_increase": increase_error,
                "attention_kl": kl_error,
                "output_error": output_error_error,
            },
            by_length=self._measure_buckets(extra.sum(0), buckets.sum(0)),
            text_losses=(loss.sum(1) / count).tolist(),
        )

    def _measure_buckets(
        self, extra: torch.Tensor, count: torch.Tensor
    ) -> list[measured.BucketMeasures]:
        """The increase in each bucket, from its `extra` loss and its tokens, `[buckets]`."""
        found = []
        for (low, high), lost, tokens in zip(pairwise(self.edges), extra, count, strict=True):
            if tokens:  # the last position of a row has no loss
                increase = math.expm1((lost / tokens).item())
                bucket = measured.BucketMeasures(from_=low, to=high, perplexity_increase=increase)
                found.append(bucket)
        return found

    def _all(self, name: str) -> torch.Tensor:
        """The sums of all texts."""
        return torch.cat(self._parts[name])

    def _by_layer(self, name: str) -> torch.Tensor:
        """The sums of each layer, `[layers, texts]`."""
        return torch.stack([self._all(f"{name} {layer}") for layer in self.layers])


def _perplexity(loss: torch.Tensor, count: torch.Tensor) -> float:
    return math.exp((loss / count).item())
