"""Running the models of an evaluation: every text through the exact model, and through each arm
read through each cache."""

import random
from dataclasses import dataclass
from itertools import product

import torch
from transformers import PreTrainedModel

from rotationzoo.cache.arm import Arm
from rotationzoo.cache.simulated import Simulation
from rotationzoo.cache.windows import Cache
from rotationzoo.errors import RotationZooError
from rotationzoo.evaluation.buckets import Buckets
from rotationzoo.evaluation.metrics import Metrics
from rotationzoo.model.capture import Attention, intercept
from rotationzoo.model.geometry import Geometry
from rotationzoo.model.loading import input_device
from rotationzoo.progress import Progress

_LOCATING_TOKENS = 8  # any number would do: each layer calls attention once


@dataclass(frozen=True)
class Trial:
    """What every text is run through."""

    geometry: Geometry
    arms: list[Arm]
    caches: list[Cache]
    layers: list[int]
    """Layers that read a cache stored in 2 bits."""
    sides: tuple[str, ...]
    """Which of keys and values are stored in 2 bits."""
    queries: int
    """Queries a row whose attention is compared; 0 for none."""
    start: int
    """The first position that is measured."""


@dataclass(frozen=True)
class Measurements:
    """What the models did on all texts."""

    exact: Metrics
    arms: dict[tuple[Cache, str], Metrics]
    """By cache and name of the arm."""


@torch.no_grad()
def run_models(
    model: PreTrainedModel, batches: list[torch.Tensor], trial: Trial, progress: Progress
) -> Measurements:
    """Run every batch `[B, T]` of token ids, alone and through all arms and caches.

    Raises `RotationZooError` where no row is long enough to read anything from a 2-bit cache.
    """
    # A position is measured by the token after it, so a row needs one more.
    batches = [ids for ids in batches if ids.shape[1] > trial.start + 1]
    if not batches:
        raise RotationZooError(
            f"no row is longer than {trial.start + 1} tokens",
            hint="give longer documents, or smaller --windows",
        )
    longest = max(ids.shape[1] for ids in batches)
    buckets = Buckets.between(trial.start, longest)
    exact = Metrics(buckets, trial.layers)
    arms = {
        (cache, arm.name): Metrics(buckets, trial.layers)
        for cache, arm in product(trial.caches, trial.arms)
    }
    device = input_device(model)
    modules = attention_modules(model, batches[0][:1, :_LOCATING_TOKENS].to(device))
    done, total = 0, len(batches) * (1 + len(arms))
    for number, batch in enumerate(batches):
        ids = batch.to(device)
        exact.add_losses(token_losses(model, ids, trial.start))
        progress("evaluating", done := done + 1, total)
        queries = _draw_queries(trial, ids.shape[1], seed=number)
        for cache, arm in product(trial.caches, trial.arms):
            metrics = arms[cache, arm.name]
            simulation = Simulation(
                arm, cache, trial.geometry, set(trial.layers), trial.sides, queries
            )
            # One forward pass gives all three: losses of the model that reads this cache to its
            # end, and of each layer its output and attention beside the exact ones.
            with simulation.running(model, modules, metrics.add_output, metrics.add_kl):
                metrics.add_losses(token_losses(model, ids, trial.start))
            progress("evaluating", done := done + 1, total)
    return Measurements(exact, arms)


def attention_modules(model: PreTrainedModel, ids: torch.Tensor) -> dict[int, torch.nn.Module]:
    """The module that calls attention in each layer, by running a few tokens `[B, T]`."""
    modules: dict[int, torch.nn.Module] = {}

    def note(
        layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attend: Attention
    ) -> torch.Tensor:
        modules[layer] = attend.module
        return attend(query, key, value)

    with intercept(model, note):
        model(input_ids=ids, use_cache=False)
    return modules


def token_losses(model: PreTrainedModel, ids: torch.Tensor, start: int) -> torch.Tensor:
    """Negative log likelihood `[B, T - start - 1]`, in float32, of the token after each position
    from `start` on."""
    kept = ids.shape[1] - start
    # Logits of the other positions are not computed: a vocabulary is far wider than the model.
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=kept).logits[:, -kept:-1]
    losses = []
    # A row at a time: the float32 copy of a whole batch's logits may not fit.
    for row, targets in zip(logits, ids[:, start + 1 :], strict=True):
        targets = targets.to(row.device)
        losses.append(torch.nn.functional.cross_entropy(row.float(), targets, reduction="none"))
    return torch.stack(losses)


def _draw_queries(trial: Trial, length: int, seed: int) -> torch.Tensor | None:
    """Positions `[Q]`, ascending, of the queries whose attention is compared: the same for every
    arm, and all past the windows."""
    if not trial.queries:
        return None
    positions = range(trial.start, length)
    # Attention weights take memory by queries times keys: a sample shows the mean as well.
    count = min(trial.queries, len(positions))
    return torch.tensor(sorted(random.Random(seed).sample(positions, count)))
