"""Paired comparisons over texts: mean differences, their standard errors, and which scores are
clearly lower."""

import torch


def paired_difference(
    losses: list[float], baseline_losses: list[float], tokens: list[int]
) -> tuple[float, float | None]:
    """Mean difference of two arms' log perplexities on the same texts, and its standard error (None
    for a single text). Each text is weighted by its `tokens`."""
    difference = torch.tensor(losses, dtype=torch.float64) - torch.tensor(
        baseline_losses, dtype=torch.float64
    )
    return weighted_mean(difference, torch.tensor(tokens, dtype=torch.float64))


def weighted_mean(values: torch.Tensor, weights: torch.Tensor) -> tuple[float, float | None]:
    """Weighted mean over texts and its standard error. The error is None where only one text has
    weight."""
    counted = weights > 0  # a text of no weight must not count in the standard error
    shares = weights[counted] / weights.sum()
    values = values[counted]
    mean = (shares * values).sum()
    texts = len(values)
    if texts < 2:
        return mean.item(), None
    variance = (shares * (values - mean)).square().sum() * texts / (texts - 1)
    return mean.item(), variance.sqrt().item()
