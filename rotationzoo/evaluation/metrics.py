"""Sums of an evaluation by text and context length, and the means and standard errors that they
give."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from rotationzoo.linalg.paired import weighted_mean


def buckets_of(start: int, length: int) -> list[int]:
    """Edges of context-length buckets from `start` to `length`: powers of two, so that growth with
    length shows."""
    edges = [start]
    power = 1 << start.bit_length()
    while power < length:
        edges.append(power)
        power *= 2
    return [*edges, length]


class Metrics:
    """What one arm did on every text. Sums are kept as `[texts, buckets]` (by layer where it is
    measured by layer).

    A text's own mean is compared with the exact model's on the same text, so a standard error is
    that of the paired differences over texts. Texts count by their tokens.
    """

    def __init__(self, edges: Sequence[int], layers: list[int], start: int):
        self.edges, self.layers, self.start = list(edges), layers, start
        self.losses: list[torch.Tensor] = []
        self.counts: list[torch.Tensor] = []
        self._errors: dict[int, list[torch.Tensor]] = {layer: [] for layer in layers}
        self._norms: dict[int, list[torch.Tensor]] = {layer: [] for layer in layers}
        self._divergences: dict[int, list[torch.Tensor]] = {layer: [] for layer in layers}
        self._sampled: list[torch.Tensor] = []

    def add_losses(self, losses: torch.Tensor) -> None:
        """`[B, P]` for the positions from `start` on."""
        member = self._member(torch.arange(self.start, self.start + losses.shape[1]))
        self.losses.append(losses.double().cpu() @ member)
        self.counts.append(torch.ones(losses.shape, dtype=torch.float64) @ member)

    def see_output(self, layer: int, output: torch.Tensor, exact: torch.Tensor) -> None:
        """Outputs `[B, T, hidden]` of one attention block."""
        output, exact = output[:, self.start :].float(), exact[:, self.start :].float()
        member = self._member(torch.arange(self.start, self.start + output.shape[1]))
        self._errors[layer].append((output - exact).square().sum(-1).double().cpu() @ member)
        self._norms[layer].append(exact.square().sum(-1).double().cpu() @ member)

    def see_kl(self, layer: int, divergence: torch.Tensor, positions: torch.Tensor) -> None:
        """KL `[B, Q]` of queries at these positions."""
        member = self._member(positions)
        self._divergences[layer].append(divergence.double().cpu() @ member)
        if layer == self.layers[0]:
            self._sampled.append(member.sum(0).expand(len(divergence), -1))

    @property
    def tokens(self) -> int:
        return int(torch.cat(self.counts).sum())

    def exact_report(self) -> dict[str, Any]:
        loss, count = torch.cat(self.losses), torch.cat(self.counts)
        return {
            "text_tokens": count.sum(1).long().tolist(),
            "perplexity": _perplexity(loss.sum(), count.sum()),
            "by_length": [
                {
                    "from": low,
                    "to": high,
                    "perplexity": _perplexity(loss[:, i].sum(), count[:, i].sum()),
                }
                for i, (low, high) in enumerate(zip(self.edges, self.edges[1:], strict=False))
            ],
            "text_losses": self._text_losses(),
        }

    def report(self, exact: "Metrics") -> dict[str, Any]:
        """All metrics, over everything and by context length."""
        whole = self._metrics(exact, slice(None))
        by_length = [
            {"from": low, "to": high, **self._metrics(exact, slice(i, i + 1))}
            for i, (low, high) in enumerate(zip(self.edges, self.edges[1:], strict=False))
        ]
        return {
            **whole,
            "by_length": by_length,
            "by_layer": self._by_layer(),
            "text_losses": self._text_losses(),
        }

    def _text_losses(self) -> list[float]:
        """Mean negative log likelihood of each text's tokens, nats."""
        return (torch.cat(self.losses).sum(1) / torch.cat(self.counts).sum(1)).tolist()

    def _by_layer(self) -> list[dict[str, Any]]:
        """Block error and KL of each layer, over all texts."""
        found = []
        for layer in self.layers:
            error, norm = (torch.cat(t[layer]).sum().item() for t in (self._errors, self._norms))
            kl = None
            if self._sampled:
                kl = (
                    torch.cat(self._divergences[layer]).sum() / torch.cat(self._sampled).sum()
                ).item()
            found.append(
                {"layer": layer, "output_error": (error / norm) ** 0.5, "attention_kl": kl}
            )
        return found

    def _metrics(self, exact: "Metrics", bucket: slice) -> dict[str, Any]:
        loss, base, count = (
            torch.cat(t)[:, bucket].sum(1) for t in (self.losses, exact.losses, self.counts)
        )
        extra, extra_error = weighted_mean((loss - base) / count, count)
        errors, norms = (
            torch.stack([torch.cat(t[layer])[:, bucket].sum(1) for layer in self.layers])
            for t in (self._errors, self._norms)
        )
        relative, relative_error = weighted_mean((errors / norms).sqrt().mean(0), count)
        kl: float | None = None
        kl_error: float | None = None
        if self._sampled:
            sampled = torch.cat(self._sampled)[:, bucket].sum(1)
            by_layer = torch.stack(
                [torch.cat(self._divergences[layer])[:, bucket].sum(1) for layer in self.layers]
            )
            if sampled.sum():
                kl, kl_error = weighted_mean(by_layer.mean(0) / sampled, sampled)
        increase = math.expm1(extra)
        return {
            "perplexity": _perplexity(loss.sum(), count.sum()),
            "perplexity_increase": increase,
            "attention_kl": kl,
            "output_error": relative,
            "standard_error": {
                "perplexity_increase": None
                if extra_error is None
                else (1 + increase) * extra_error,
                "attention_kl": kl_error,
                "output_error": relative_error,
            },
        }

    def _member(self, positions: torch.Tensor) -> torch.Tensor:
        """`[P, buckets]`, one where a position is in a bucket."""
        edges = torch.tensor(self.edges)
        inside = (positions[:, None] >= edges[:-1]) & (positions[:, None] < edges[1:])
        return inside.double()


def _perplexity(loss: torch.Tensor, count: torch.Tensor) -> float:
    return math.exp((loss / count).item())
