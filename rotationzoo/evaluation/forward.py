"""The forward passes of an evaluation: every text through the exact model, and through every
combination of arm and cache, whose perplexities are compared; and their pace, from which the time
that is left is estimated."""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from time import perf_counter

import torch
from transformers import PreTrainedModel

from rotationzoo.artifact import measured
from rotationzoo.codec.windows import CacheLayout
from rotationzoo.errors import RotationZooError
from rotationzoo.evaluation.arms import Arm
from rotationzoo.geometry import Geometry
from rotationzoo.linalg.paired import weighted_mean
from rotationzoo.model.loading import input_device
from rotationzoo.model.prediction import check_finite, counting_layers, run_decoder
from rotationzoo.progress import InTokens, Progress
from rotationzoo.simulation.simulated import Simulation

Reader = tuple[CacheLayout, str] | None  # A cache and the name of an arm; None for the exact model
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Pace:
    """Seconds that a token takes, by its reader. `tell` is given sentences for the user."""

    tell: Tell = lambda words: None
    until: float = math.inf  # when everything is to be done, by the clock of `perf_counter`
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


@dataclass(frozen=True)
class Trial:
    """The settings that every text is run with: most are those of the `Evaluation`."""

    geometry: Geometry
    arms: Sequence[Arm]
    caches: list[CacheLayout]
    layers: list[int]  # the layers that read a 2-bit cache
    start: int  # the first measured position


class Losses:
    """What one arm, or the exact model, lost on every text. Standard errors are those of paired
    differences over texts, weighted by their numbers of tokens."""

    def __init__(self) -> None:
        self._losses: list[torch.Tensor] = []
        self._counts: list[torch.Tensor] = []

    def add(self, losses: torch.Tensor) -> None:
        """Add the negative log likelihoods `[B, P]` of texts."""
        # Sum in float64: over a long text, arms may differ by less than float32 rounding.
        self._losses.append(losses.double().cpu().sum(1))
        self._counts.append(torch.full((len(losses),), losses.shape[1], dtype=torch.float64))

    @property
    def loss(self) -> torch.Tensor:
        """The sum of each text, `[texts]`."""
        return torch.cat(self._losses)

    @property
    def count(self) -> torch.Tensor:
        """The tokens of each text that have a loss, `[texts]`."""
        return torch.cat(self._counts)

    @property
    def tokens(self) -> int:
        """The number of tokens that have a loss."""
        return int(self.count.sum())

    @property
    def perplexity(self) -> float:
        """That of all texts together."""
        return math.exp((self.loss.sum() / self.count.sum()).item())

    def measure_exact(self) -> measured.ExactCosts:
        """The report on the exact model."""
        return measured.ExactCosts(
            text_tokens=self.count.long().tolist(),
            perplexity=self.perplexity,
            text_losses=(self.loss / self.count).tolist(),
        )

    def measure_arm(self, exact: "Losses") -> measured.ArmCosts:
        """The report on an arm, compared with the exact model on the same texts."""
        count = self.count
        mean, error = weighted_mean((self.loss - exact.loss) / count, count)
        increase = math.expm1(mean)
        # To first order, the standard error of exp(x) - 1 is exp(x) times that of x.
        increase_error = None if error is None else (1 + increase) * error
        return measured.ArmCosts(
            perplexity=self.perplexity,
            perplexity_increase=increase,
            standard_error={"perplexity_increase": increase_error},
            text_losses=(self.loss / count).tolist(),
        )


@torch.no_grad()
def run_models(
    model: PreTrainedModel,
    batches: list[torch.Tensor],
    trial: Trial,
    progress: Progress,
    pace: Pace | None = None,
    reserve: float = 0,
) -> dict[Reader, Losses]:
    """The losses of the exact model and of every combination of cache and arm, over all batches
    `[B, T]` of token ids. A batch after the first is left out where `reserve` seconds would not be
    left after it.

    Raises `RotationZooError` if no row is long enough to read anything from a 2-bit cache, and
    `Unsound` for an exact model whose losses are not finite.
    """
    # A position is measured by how well it predicts the next token, so a row needs one more token.
    batches = [ids for ids in batches if ids.shape[1] > trial.start + 1]
    if not batches:
        hint = "give longer documents, or smaller --windows"
        raise RotationZooError(f"no row is longer than {trial.start + 1} tokens", hint)
    device, pairs = input_device(model), list(product(trial.caches, trial.arms))
    losses: dict[Reader, Losses] = {None: Losses()}
    losses |= {(cache, arm.name): Losses() for cache, arm in pairs}
    runs = list(product(range(len(batches)), [None, *pairs]))
    passes = InTokens(progress, [batches[run[0]].numel() for run in runs])
    pace, names = pace or Pace(), [arm.name for arm in trial.arms]
    passes("evaluating", 0, len(runs))
    for done, (number, pair) in enumerate(runs):
        ids, reader = batches[number].to(device), pair and (pair[0], pair[1].name)
        if done and pair is None and pace.left - reserve < pace.estimate(ids.numel(), names):
            break
        running: AbstractContextManager[None] = nullcontext()
        if pair is not None:
            cache, arm = pair
            simulation = Simulation(arm.codec, cache, trial.geometry, set(trial.layers))
            running = simulation.running(model)
        counting = counting_layers(model, passes.tell_part)
        with pace.timing(reader, ids.numel()), running, counting:
            found = token_losses(model, ids, trial.start)
        if pair is None:
            check_finite(model, found, partial(run_decoder, model, ids))
        losses[reader].add(found)
        passes("evaluating", done + 1, len(runs))
    return losses


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
