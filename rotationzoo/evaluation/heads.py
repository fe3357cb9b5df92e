"""The figures that `evaluate` reports of single KV heads: attention KL, output error, and the
ranges of the rows that are rounded."""

import torch

from rotationzoo.evaluation.measures import HeadMeasures

COMPARED_TOKENS = 8192
"""Tokens of outputs that are compared at a time: float32 copies of long rows take gigabytes."""

_KL, _ERROR, _RANGES = "head divergence", "head error", {"key": "key range", "value": "value range"}


class HeadSums:
    """Sums of what one arm did on every text, by layer and KV head.

    Every figure is the ratio of two sums, over all texts together: `[texts, H, 2]`. The sums of a
    text do not depend on the others of its batch.
    """

    def __init__(self, layers: list[int]):
        names = (_KL, _ERROR, *_RANGES.values())
        self.parts: dict[str, list[torch.Tensor]] = {
            f"{name} {layer}": [] for name in names for layer in layers
        }
        """All sums by name, each with one part `[B, H, 2]` per batch."""

    def add_kl(self, layer: int, divergence: torch.Tensor) -> None:
        """Add the attention KL `[B, H, Q]` of sampled queries."""
        self._add_mean(_KL, layer, divergence)

    def add_output(self, layer: int, output: torch.Tensor, exact: torch.Tensor) -> None:
        """Add attention outputs `[B, T, H, N]`: the arm's and the exact ones, where N channels
        belong to a KV head."""
        errors, norms = [], []
        parts = output.split(COMPARED_TOKENS, dim=1), exact.split(COMPARED_TOKENS, dim=1)
        for part, exact_part in zip(*parts, strict=True):
            exact_part = exact_part.float()
            difference = part.float() - exact_part
            errors.append(difference.square_().sum(-1).double().sum(1))
            norms.append(exact_part.square().sum(-1).double().sum(1))
        self._add(_ERROR, layer, torch.stack(errors).sum(0), torch.stack(norms).sum(0))

    def add_row_range(self, layer: int, side: str, ranges: torch.Tensor) -> None:
        """Add the ranges `[B, H, T]` of the rows of a side."""
        self._add_mean(_RANGES[side], layer, ranges)

    def measure(self, layer: int) -> HeadMeasures:
        """The report on one layer."""
        heads = max(len(self._ratios(name, layer)) for name in (_KL, _ERROR, *_RANGES.values()))
        missing: list[float | None] = [None] * heads
        errors = self._ratios(_ERROR, layer).sqrt()
        return {
            "attention_kl": _numbers(self._ratios(_KL, layer)) or missing,
            "output_error": _numbers(errors) or missing,
            "key_row_range": _numbers(self._ratios(_RANGES["key"], layer)) or missing,
            "value_row_range": _numbers(self._ratios(_RANGES["value"], layer)) or missing,
        }

    def _add_mean(self, name: str, layer: int, values: torch.Tensor) -> None:
        """Add values `[B, H, N]` of which the mean is reported."""
        sums = values.double().sum(2)
        self._add(name, layer, sums, torch.full_like(sums, values.shape[2]))

    def _add(self, name: str, layer: int, above: torch.Tensor, below: torch.Tensor) -> None:
        self.parts[f"{name} {layer}"].append(torch.stack([above, below], dim=-1).cpu())

    def _ratios(self, name: str, layer: int) -> torch.Tensor:
        """The ratios `[H]` of both sums over all texts; none where nothing was added."""
        parts = self.parts[f"{name} {layer}"]
        if not parts:
            return torch.zeros(0, dtype=torch.float64)
        above, below = torch.cat(parts).sum(0).unbind(-1)
        return above / below


def _numbers(ratios: torch.Tensor) -> list[float | None]:
    """Ratios as numbers of JSON, which has none for 0 / 0, as of a head whose outputs are all 0."""
    numbers: list[float | None] = ratios.tolist()
    for head in ratios.isnan().nonzero().flatten().tolist():
        numbers[head] = None
    return numbers
