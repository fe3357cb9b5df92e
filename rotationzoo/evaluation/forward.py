"""The forward passes of an evaluation: every text through the exact model, and through every
combination of arm and cache; and their pace, from which the time that is left is estimated."""

import math
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from time import perf_counter

import torch
from transformers import PreTrainedModel

from rotationzoo.codec.windows import CacheLayout
from rotationzoo.errors import RotationZooError
from rotationzoo.evaluation.arms import Arm
from rotationzoo.evaluation.metrics import Metrics, bucket_edges
from rotationzoo.geometry import Geometry
from rotationzoo.model.capture import Call, intercept
from rotationzoo.model.loading import input_device
from rotationzoo.model.prediction import check_finite, counting_layers, run_decoder
from rotationzoo.progress import InTokens, Progress
from rotationzoo.simulation.simulated import Simulation

Reader = tuple[CacheLayout, str] | None
"""A cache and the name of an arm; None for the exact model."""
Tell = Callable[[str], None]


def say_nothing(words: str) -> None:
    """Ignore the words."""


@dataclass(frozen=True)
class Pace:
    """Seconds that a token takes, by its reader. `tell` is given sentences for the user."""

    tell: Tell = say_nothing
    until: float = math.inf
    """When everything is to be done, by the clock of `perf_counter`."""
    seconds: dict[Reader, float] = field(default_factory=dict)

    @property
    def left(self) -> float:
        """Seconds until everything is to be done."""
        return self.until - perf_counter()

    @contextmanager
    def timing(self, reader: Reader, tokens: int) -> Iterator[None]:
        """Measure how long this reader takes for `tokens` tokens."""
        begun = perf_counter()
        yield
        self.seconds[reader] = (perf_counter() - begun) / tokens

    def estimate(self, tokens: float, arms: Collection[str]) -> float:
        """The seconds in which the exact model and the named arms read `tokens` tokens each."""
        pace = self.seconds.items()
        return tokens * sum(each for read, each in pace if read is None or read[1] in arms)


_LOCATING_TOKENS = 8  # any number works: each layer calls attention once per forward pass


@dataclass(frozen=True)
class Trial:
    """The settings that every text is run with: most are those of the `Evaluation`."""

    geometry: Geometry
    arms: Sequence[Arm]
    caches: list[CacheLayout]
    layers: list[int]
    """The layers that read a 2-bit cache."""
    queries: int
    start: int
    """The first measured position."""


@dataclass(frozen=True)
class Measurements:
    """The metrics of the exact model and of every arm, over all texts."""

    exact: Metrics
    arms: dict[tuple[CacheLayout, str], Metrics]
    """Keyed by cache and name of the arm."""


@torch.no_grad()
def run_models(
    model: PreTrainedModel,
    batches: list[torch.Tensor],
    trial: Trial,
    progress: Progress,
    pace: Pace | None = None,
    reserve: float = 0,
) -> Measurements:
    """Run every batch `[B, T]` of token ids through the exact model and through every combination
    of cache and arm. A batch after the first is left out where `reserve` seconds would not be left
    after it.

    Raises `RotationZooError` if no row is long enough to read anything from a 2-bit cache, and
    `Unsound` for an exact model whose losses are not finite.
    """
    # A position is measured by how well it predicts the next token, so a row needs one more token.
    batches = [ids for ids in batches if ids.shape[1] > trial.start + 1]
    if not batches:
        hint = "give longer documents, or smaller --windows"
        raise RotationZooError(f"no row is longer than {trial.start + 1} tokens", hint)
    edges = bucket_edges(trial.start, max(ids.shape[1] for ids in batches))
    device = input_device(model)
    modules = attention_modules(model, batches[0][:1, :_LOCATING_TOKENS].to(device))
    exact = Metrics(edges, trial.layers)
    pairs = list(product(trial.caches, trial.arms))
    arms = {(cache, arm.name): Metrics(edges, trial.layers) for cache, arm in pairs}
    runs = list(product(range(len(batches)), [None, *pairs]))
    passes = InTokens(progress, [batches[run[0]].numel() for run in runs])
    pace, names = pace or Pace(), [arm.name for arm in trial.arms]
    passes("evaluating", 0, len(runs))
    for done, (number, pair) in enumerate(runs):
        ids, metrics = batches[number].to(device), exact
        if done and pair is None and pace.left - reserve < pace.estimate(ids.numel(), names):
            break
        running: AbstractContextManager[None] = nullcontext()
        if pair is not None:
            cache, arm = pair
            metrics = arms[cache, arm.name]
            queries = _draw_queries(trial, ids.shape[1], seed=number)
            simulation = Simulation(arm.codec, cache, trial.geometry, set(trial.layers), queries)
            running = simulation.running(model, modules, metrics.observers)
        counting = counting_layers(model, passes.tell_part)
        with pace.timing(pair and (pair[0], pair[1].name), ids.numel()), running, counting:
            losses = token_losses(model, ids, trial.start)
        if pair is None:
            check_finite(model, losses, partial(run_decoder, model, ids))
        metrics.add_losses(losses)
        passes("evaluating", done + 1, len(runs))
    return Measurements(exact, arms)


def attention_modules(model: PreTrainedModel, ids: torch.Tensor) -> dict[int, torch.nn.Module]:
    """Layer -> the module that calls attention there, found by running a few tokens `[B, T]`."""
    modules: dict[int, torch.nn.Module] = {}

    def note(call: Call) -> torch.Tensor:
        modules[call.layer] = call.attend.module
        return call.run()

    with intercept(model, note):
        model(input_ids=ids, use_cache=False)
    return modules


def token_losses(model: PreTrainedModel, ids: torch.Tensor, start: int) -> torch.Tensor:
    """The negative log likelihood of each next token, for positions from `start` on: float32
    `[B, T - start - 1]`."""
    last = ids.shape[1] - 1
    losses = ids.new_empty(len(ids), last - start, dtype=torch.float32, device="cpu")
    # Blocks, because the logits of a whole row may be larger than the model: the vocabulary is far
    # wider than the hidden state.
    for at, logits in run_decoder(model, ids).blocks(start, last):
        targets = ids[:, at.start + 1 : at.stop + 1].to(logits.device)
        block = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), reduction="none"
        )
        losses[:, at.start - start : at.stop - start] = block.unflatten(0, targets.shape)
    return losses


def _draw_queries(trial: Trial, length: int, seed: int) -> torch.Tensor | None:
    """The positions of the queries whose attention is compared, the same for every arm: ascending,
    `[Q]`, from `trial.start` on; or None."""
    if not trial.queries:
        return None
    positions = range(trial.start, length)
    # A sample, because attention weights need memory for queries times keys.
    count = min(trial.queries, len(positions))
    return torch.tensor(sorted(random.Random(seed).sample(positions, count)))
