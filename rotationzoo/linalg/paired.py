"""Paired comparisons over texts: mean differences, their standard errors, and what is clearly
less."""

import torch


def paired_difference(
    losses: list[float], others: list[float], tokens: list[int]
) -> tuple[float, float | None]:
    """Mean difference of the log perplexities of two arms on the same texts, and its standard error
    (None: a single text)."""
    one, other = (
        torch.tensor(losses, dtype=torch.float64),
        torch.tensor(others, dtype=torch.float64),
    )
    return weighted_mean(one - other, torch.tensor(tokens, dtype=torch.float64))


def clearly_less(after: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Boolean `[...]`: whether scores `[texts, ...]` are lower by more than a standard error of
    their paired difference."""
    difference = after - before
    error = (
        difference.std(0) / len(difference) ** 0.5
        if len(difference) > 1
        else torch.zeros_like(difference[0])
    )
    return difference.mean(0) < -error


def weighted_mean(values: torch.Tensor, weights: torch.Tensor) -> tuple[float, float | None]:
    """Weighted mean over texts and its standard error, None where a single text gives none."""
    held = weights > 0
    values, weights = values[held], weights[held] / weights.sum()
    mean = (weights * values).sum()
    n = len(values)
    if n < 2:
        return mean.item(), None
    return mean.item(), ((weights * (values - mean)).square().sum() * n / (n - 1)).sqrt().item()
