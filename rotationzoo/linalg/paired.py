"""Paired comparisons over texts or prompts: mean differences, standard errors and p values."""

from collections.abc import Iterable, Sequence

import torch


def paired_difference(
    losses: list[float], baseline_losses: list[float], tokens: list[int]
) -> tuple[float, float | None]:
    """Mean difference of two arms' log perplexities on texts, weighted by `tokens`, and its
    standard error (None for a single text)."""
    arm, baseline = torch.tensor([losses, baseline_losses], dtype=torch.float64)
    return weighted_mean(arm - baseline, torch.tensor(tokens, dtype=torch.float64))


def weighted_mean(values: torch.Tensor, weights: torch.Tensor) -> tuple[float, float | None]:
    """Weighted mean over texts and its standard error: None if only one text has weight."""
    counted = weights > 0  # a text without weight must not count in the standard error
    shares = weights[counted] / weights.sum()
    values = values[counted]
    mean = (shares * values).sum()
    texts = len(values)
    if texts < 2:
        return mean.item(), None
    variance = (shares * (values - mean)).square().sum() * texts / (texts - 1)
    return mean.item(), variance.sqrt().item()


def sign_flip(differences: Iterable[int]) -> float:
    """The two-sided p value of the sign-flip permutation test (Fisher 1935): the share of all sign
    choices whose sum is at least as far from 0 as the sum of the differences.

    A difference is how many more questions of a prompt one arm answers. With one question per
    prompt this is McNemar's exact test. The distribution is exact, built prompt by prompt.
    """
    signed = [difference for difference in differences if difference]
    chances = torch.ones(1, dtype=torch.float64)  # of the sums -S, -S + 2, ..., S
    for size in map(abs, signed):
        gap = torch.zeros(size, dtype=torch.float64)
        chances = (torch.cat([chances, gap]) + torch.cat([gap, chances])) / 2
    largest = len(chances) - 1
    sums = torch.arange(-largest, largest + 1, 2)
    return min(1.0, chances[sums.abs() >= abs(sum(signed))].sum().item())


def holm(values: Sequence[float]) -> list[float]:
    """P values corrected for multiple comparisons (Holm 1979), in the given order."""
    ranked = sorted((value, index) for index, value in enumerate(values))
    corrected, largest = [0.0] * len(values), 0.0
    for left, (value, index) in zip(range(len(ranked), 0, -1), ranked, strict=True):
        # Corrected values keep the order of the p values.
        corrected[index] = largest = max(largest, min(1.0, left * value))
    return corrected
