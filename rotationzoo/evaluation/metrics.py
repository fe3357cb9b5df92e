"""Every figure that `evaluate` reports of a model or an arm: sums over texts and context lengths,
and the means and standard errors that they give.

A new column of `evaluate` is computed here, in `Metrics`, from what `forward` observes, and printed
in `cli.evaluate_view`.
"""

import math
from typing import TypedDict

import torch

from rotationzoo.evaluation.buckets import Buckets
from rotationzoo.linalg.paired import weighted_mean

# These are the JSON of `evaluate`: their keys, in this order, are a contract with its readers.
Range = TypedDict("Range", {"from": int, "to": int})
"""The positions of a bucket: first, and one after the last."""


class StandardErrors(TypedDict):
    """Over texts; None where there is a single text."""

    perplexity_increase: float | None
    attention_kl: float | None
    output_error: float | None


class Measures(TypedDict):
    """What one arm costs the model."""

    perplexity: float
    perplexity_increase: float
    """Relative to the exact model on the same tokens."""
    attention_kl: float | None
    """Nats, mean over layers, heads and sampled queries; None where none were sampled."""
    output_error: float
    """Of the attention block's output, relative in RMS, mean over layers."""
    standard_error: StandardErrors


class BucketMeasures(Range, Measures):
    """The same at the context lengths of one bucket."""


class LayerMeasures(TypedDict):
    """One layer, over all texts."""

    layer: int
    output_error: float
    attention_kl: float | None


class ArmMeasures(Measures):
    """All that is measured of an arm read through one cache."""

    by_length: list[BucketMeasures]
    by_layer: list[LayerMeasures]
    text_losses: list[float]


class RangePerplexity(Range):
    """The exact model at the context lengths of one bucket."""

    perplexity: float


class ExactMeasures(TypedDict):
    """All that is measured of the model without a 2-bit cache."""

    text_tokens: list[int]
    perplexity: float
    by_length: list[RangePerplexity]
    text_losses: list[float]


class Metrics:
    """Sums over every text of what one arm, or the exact model, did on it.

    Sums are kept as `[texts, buckets]`, and by layer for what is measured by layer. Each text's
    mean is compared with the exact model's on the same text, so standard errors are those of paired
    differences over texts. Texts count by their tokens.
    """

    def __init__(self, buckets: Buckets, layers: list[int]):
        self.buckets, self.layers = buckets, layers
        self._losses: list[torch.Tensor] = []
        self._counts: list[torch.Tensor] = []
        self._errors: dict[int, list[torch.Tensor]] = {layer: [] for layer in layers}
        self._norms: dict[int, list[torch.Tensor]] = {layer: [] for layer in layers}
        self._divergences: dict[int, list[torch.Tensor]] = {layer: [] for layer in layers}
        self._sampled: list[torch.Tensor] = []

    def add_losses(self, losses: torch.Tensor) -> None:
        """Add negative log likelihoods `[B, P]` for the positions from the first bucket on."""
        member = self._member_from_start(losses.shape[1])
        # Summed in float64: arms may differ by less than float32 rounds away over a long text.
        self._losses.append(losses.double().cpu() @ member)
        self._counts.append(torch.ones(losses.shape, dtype=torch.float64) @ member)

    def add_output(self, layer: int, output: torch.Tensor, exact: torch.Tensor) -> None:
        """Add the outputs `[B, T, hidden]` of one attention block: the arm's, and the exact."""
        start = self.buckets.start
        output, exact = output[:, start:].float(), exact[:, start:].float()
        member = self._member_from_start(output.shape[1])
        self._errors[layer].append((output - exact).square().sum(-1).double().cpu() @ member)
        self._norms[layer].append(exact.square().sum(-1).double().cpu() @ member)

    def add_kl(self, layer: int, divergence: torch.Tensor, positions: torch.Tensor) -> None:
        """Add the KL `[B, Q]` of the attention of queries at `positions` `[Q]`."""
        member = self.buckets.one_hot(positions)
        self._divergences[layer].append(divergence.double().cpu() @ member)
        # Every layer samples the same queries: the first counts them for all.
        if layer == self.layers[0]:
            self._sampled.append(member.sum(0).expand(len(divergence), -1))

    @property
    def tokens(self) -> int:
        """Tokens that the losses are of."""
        return int(torch.cat(self._counts).sum())

    def measure_exact(self) -> ExactMeasures:
        """What is reported of the exact model: its losses."""
        loss, count = torch.cat(self._losses), torch.cat(self._counts)
        by_length: list[RangePerplexity] = []
        for i, (low, high) in enumerate(self.buckets.ranges):
            perplexity = _perplexity(loss[:, i].sum(), count[:, i].sum())
            by_length.append({"from": low, "to": high, "perplexity": perplexity})
        return {
            "text_tokens": count.sum(1).long().tolist(),
            "perplexity": _perplexity(loss.sum(), count.sum()),
            "by_length": by_length,
            "text_losses": self._text_losses(),
        }

    def measure_arm(self, exact: "Metrics") -> ArmMeasures:
        """What is reported of an arm, beside the exact model on the same texts."""
        by_length: list[BucketMeasures] = []
        for i, (low, high) in enumerate(self.buckets.ranges):
            measures = self._measure(exact, slice(i, i + 1))
            by_length.append({"from": low, "to": high, **measures})
        return {
            **self._measure(exact, slice(None)),
            "by_length": by_length,
            "by_layer": [self._measure_layer(layer) for layer in self.layers],
            "text_losses": self._text_losses(),
        }

    def _measure(self, exact: "Metrics", buckets: slice) -> Measures:
        """Over all texts, in some of the buckets."""
        loss, exact_loss = _sum(self._losses, buckets), _sum(exact._losses, buckets)
        count = _sum(self._counts, buckets)
        # A text that ends before these buckets divides by 0 here; its weight is 0 as well.
        extra, extra_error = weighted_mean((loss - exact_loss) / count, count)
        increase = math.expm1(extra)
        # The error of exp(x) - 1 is that of x times exp(x), to first order.
        increase_error = None if extra_error is None else (1 + increase) * extra_error
        output_error, output_error_error = weighted_mean(self._relative_errors(buckets), count)
        kl, kl_error = self._attention_kl(buckets)
        return {
            "perplexity": _perplexity(loss.sum(), count.sum()),
            "perplexity_increase": increase,
            "attention_kl": kl,
            "output_error": output_error,
            "standard_error": {
                "perplexity_increase": increase_error,
                "attention_kl": kl_error,
                "output_error": output_error_error,
            },
        }

    def _relative_errors(self, buckets: slice) -> torch.Tensor:
        """Of each text's block outputs, relative in RMS, mean over layers: `[texts]`."""
        errors = torch.stack([_sum(self._errors[layer], buckets) for layer in self.layers])
        norms = torch.stack([_sum(self._norms[layer], buckets) for layer in self.layers])
        return (errors / norms).sqrt().mean(0)

    def _attention_kl(self, buckets: slice) -> tuple[float | None, float | None]:
        """Mean over layers and sampled queries, and its standard error."""
        if not self._sampled:
            return None, None
        sampled = _sum(self._sampled, buckets)
        if not sampled.sum():
            return None, None
        divergences = [_sum(self._divergences[layer], buckets) for layer in self.layers]
        return weighted_mean(torch.stack(divergences).mean(0) / sampled, sampled)

    def _measure_layer(self, layer: int) -> LayerMeasures:
        # One root of all texts' sums: a layer has no standard error that would need text by text.
        error = torch.cat(self._errors[layer]).sum().item()
        norm = torch.cat(self._norms[layer]).sum().item()
        kl = None
        if self._sampled:
            total = torch.cat(self._divergences[layer]).sum()
            kl = (total / torch.cat(self._sampled).sum()).item()
        return {"layer": layer, "output_error": (error / norm) ** 0.5, "attention_kl": kl}

    def _text_losses(self) -> list[float]:
        """Mean negative log likelihood of each text's tokens, nats."""
        return (torch.cat(self._losses).sum(1) / torch.cat(self._counts).sum(1)).tolist()

    def _member_from_start(self, count: int) -> torch.Tensor:
        """`[count, buckets]`: the bucket of each of the first positions from the start on."""
        start = self.buckets.start
        return self.buckets.one_hot(torch.arange(start, start + count))


def _sum(parts: list[torch.Tensor], buckets: slice) -> torch.Tensor:
    """Sums `[texts]` over some buckets of parts `[B, buckets]`, a part a batch of texts."""
    return torch.cat(parts)[:, buckets].sum(1)


def _perplexity(loss: torch.Tensor, count: torch.Tensor) -> float:
    return math.exp((loss / count).item())
