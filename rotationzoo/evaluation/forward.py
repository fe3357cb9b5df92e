"""The forward passes of an evaluation: each text through the exact model and through each arm with
each cache, to compare their perplexities; and their pace, from which times are estimated."""

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

Reader = tuple[CacheLayout, str] | None  # a cache and the name of an arm, or the exact model
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Pace:
    """Seconds per token of each reader. `tell` gets sentences for the user."""

    tell: Tell
    until: float  # the deadline, by the clock of `perf_counter`
    seconds: dict[Reader, float] = field(default_factory=dict)

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.until - perf_counter()

    @contextmanager
    def timing(self, reader: Reader, tokens: int) -> Iterator[None]:
        """Measure how long a reader takes for `tokens` tokens."""
        begun = perf_counter()
        yield
        self.seconds[reader] = (perf_counter() - begun) / tokens

    def estimate(self, tokens: float, arms: Collection[str]) -> float:
        """The seconds that the exact model and the named arms take for `tokens` tokens each."""
        pace = self.seconds.items()
        return tokens * sum(each for read, each in pace if read is None or read[1] in arms)


@dataclass(frozen=True)
class Trial:
    """What texts and prompts are run with."""

    geometry: Geometry
    arms: Sequence[Arm]
    caches: list[CacheLayout]
    layers: list[int]  # the layers that read a 2-bit cache
    start: int  # the first measured position

    def simulate(self, cache: CacheLayout, arm: Arm) -> Simulation:
        return Simulation(arm.codec, cache, self.geometry, set(self.layers))


class Losses:
    """The loss of one arm, or of the exact model, on each text. Standard errors are those of paired
    differences over texts, weighted by their numbers of tokens."""

    def __init__(self) -> None:
        self.loss = torch.empty(0, dtype=torch.float64)  # summed over each text, `[texts]`
        self.count = torch.empty(0, dtype=torch.float64)  # tokens of each text with a loss

    def add(self, losses: torch.Tensor) -> None:
        """Add the negative log likelihoods `[B, P]` of texts."""
        # Summed in float64: arms may differ by less than float32 rounding over a long text.
        self.loss = torch.cat([self.loss, losses.double().cpu().sum(1)])
        self.count = torch.cat([self.count, self.count.new_full((len(losses),), losses.shape[1])])

    @property
    def perplexity(self) -> float:
        return math.exp((self.loss.sum() / self.count.sum()).item())

    def measure_exact(self) -> measured.ExactCosts:
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
    pace: Pace,
    reserve: float,
) -> dict[Reader, Losses]:
    """The losses of the exact model and of each arm with each cache, over batches `[B, T]` of token
    ids. After the first batch, only those are run that leave `reserve` seconds of time. Raises
    `RotationZooError` if no row is long enough to read a 2-bit cache, and `Unsound` if the losses
    of the exact model are not finite."""
    # A row needs one token more, because the loss at a position is that of the next token.
    batches = [ids for ids in batches if ids.shape[1] > trial.start + 1]
    if not batches:
        hint = "give longer documents, or smaller --windows"
        raise RotationZooError(f"no row is longer than {trial.start + 1} tokens", hint)
    device, pairs = input_device(model), list(product(trial.caches, trial.arms))
    losses: dict[Reader, Losses] = {None: Losses()}
    losses |= {(cache, arm.name): Losses() for cache, arm in pairs}
    runs = list(product(range(len(batches)), [None, *pairs]))
    passes = InTokens(progress, [batches[run[0]].numel() for run in runs])
    names = [arm.name for arm in trial.arms]
    passes("evaluating", 0, len(runs))
    for done, (number, pair) in enumerate(runs):
        ids, reader = batches[number].to(device), pair and (pair[0], pair[1].name)
        if done and pair is None and pace.left - reserve < pace.estimate(ids.numel(), names):
            break
        running: AbstractContextManager[None] = nullcontext()
        if pair is not None:
            running = trial.simulate(*pair).running(model)
        counting = counting_layers(model, passes.tell_part)
        with pace.timing(reader, ids.numel()), running, counting:
            found = token_losses(model, ids, trial.start)
        if pair is None:
            check_finite(model, found, partial(run_decoder, model, ids))
        losses[reader].add(found)
        passes("evaluating", done + 1, len(runs))
    return losses


def token_losses(model: PreTrainedModel, ids: torch.Tensor, start: int) -> torch.Tensor:
    """The negative log likelihood of each token after `start`: float32 `[B, T - start - 1]`."""
    last = ids.shape[1] - 1
    losses = ids.new_empty(len(ids), last - start, dtype=torch.float32, device="cpu")
    # In blocks, because the logits of a whole row may be larger than the model.
    for at, logits in run_decoder(model, ids).blocks(start, last):
        targets = ids[:, at.start + 1 : at.stop + 1].to(logits.device)
        block = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), reduction="none"
        )
        losses[:, at.start - start : at.stop - start] = block.unflatten(0, targets.shape)
    return losses
