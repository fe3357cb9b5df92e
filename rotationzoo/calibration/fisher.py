"""The Fisher information of stored rows: what an error of a key or a value costs, in nats.

If tokens are drawn from the model's own predictions, and g is the gradient of their log probability
at a stored row, an error e of that row makes predictions diverge by about `e E[g^T g] e / 2` (Amari
1998). Rows in the windows are read exact, as in a server."""

import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from transformers import PreTrainedModel

from rotationzoo.calibration.sensitivity import Place, Text, windows_of
from rotationzoo.codec.int2 import Format
from rotationzoo.codec.windows import CacheLayout
from rotationzoo.errors import RotationZooError, UnsupportedModel, first_sentence
from rotationzoo.geometry import Geometry
from rotationzoo.linalg.moments import Moment, Statistics, covariance
from rotationzoo.model.loading import input_device
from rotationzoo.model.placement import is_out_of_memory
from rotationzoo.model.prediction import HiddenStates, run_decoder
from rotationzoo.progress import Progress
from rotationzoo.recipe import Recipe
from rotationzoo.sides import metric_kind
from rotationzoo.simulation.simulated import Simulation

BLOCK = 256  # predictions whose logits are held at a time
# Limits of tokens: of the text, of a row, and of a row on a CPU, because the backward pass holds
# all activations. On a CPU, 30 layers and rows of 8,192 tokens did not fit 23 GB.
TOKENS, LONGEST, LONGEST_ON_CPU = 65536, 8192, 2048
FEWEST, MOST_FOR_ANSWERS = 2, 4  # draws of tokens by default, and at most for answers


@dataclass
class _Probe:
    """A codec that stores rows exactly, plus zeros, whose gradient is that of the stored rows."""

    zeros: dict[Place, torch.Tensor] = field(default_factory=dict)
    token_group: int = 1

    def keep_exact(self, rows: torch.Tensor, layer: int, side: str) -> torch.Tensor:
        return rows

    def fake_quantize(
        self, rows: torch.Tensor, layer: int, side: str, format: Format
    ) -> torch.Tensor:
        # Layers that share a cache share its zeros.
        zeros = self.zeros.setdefault((layer, side), torch.zeros_like(rows, requires_grad=True))
        return rows + zeros

    def stored_bits(self, layer: int, side: str, dim: int, format: Format) -> float:
        return 16.0


def collect_fisher(
    model: PreTrainedModel,
    geometry: Geometry,
    texts: Iterable[Text],
    cache: CacheLayout,
    draws: int,
    seed: int = 0,
) -> dict[Place, torch.Tensor]:
    """The Fisher information `[KV heads, D, D]` per predicted token, float64 on the CPU. Tokens are
    drawn `draws` times at all positions of each text. Parameters get no gradients."""
    grads = [parameter.requires_grad for parameter in model.parameters()]
    model.requires_grad_(False)
    sums: dict[Place, Moment] = {}
    generator, count = torch.Generator(input_device(model)).manual_seed(seed), 0
    layers = {layer.index for layer in geometry}
    try:
        for text in texts:
            probe = _Probe()
            with torch.enable_grad():
                with Simulation(probe, cache, geometry, layers).running(model):
                    states = run_decoder(model, text.ids[None])
                _add_draws(states, text, probe, [generator] * draws, sums)
            count += draws * len(text.positions)
    finally:
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            parameter.requires_grad_(grad)
    found = {}
    for place, its in sums.items():
        moment = its.second.cpu() / count
        found[place] = (moment + moment.mT) / 2
    return found


def _add_draws(
    states: HiddenStates,
    text: Text,
    probe: _Probe,
    draws: Sequence[torch.Generator],
    sums: dict[Place, Moment],
) -> None:
    """Add the gradients of a text to the sums, once for each draw."""
    last, zeros = states.output.last_hidden_state, [*probe.zeros.values()]
    for number, generator in enumerate(draws, start=1):
        wanted = _gradient_of_draw(states, text.positions, generator)
        found = torch.autograd.grad(last, zeros, wanted, retain_graph=number < len(draws))
        for place, gradient in zip(probe.zeros, found, strict=True):
            if place not in sums:
                sums[place] = Moment.zeros(gradient.shape[1], gradient.shape[3], gradient.device)
            sums[place].add(gradient[0])


def _gradient_of_draw(
    states: HiddenStates, positions: Sequence[int], generator: torch.Generator
) -> torch.Tensor:
    """The gradient, at the last hidden states, of the log probability of tokens drawn there."""
    output = copy.copy(states.output)
    output["last_hidden_state"] = leaf = states.output.last_hidden_state.detach().requires_grad_()
    copied = replace(states, output=output)
    for first in range(0, len(positions), BLOCK):
        logits = copied.logits(list(positions[first : first + BLOCK]))[0]
        logs = logits.float().log_softmax(-1)
        shares = logs.detach().exp().to(generator.device)
        drawn = torch.multinomial(shares, 1, generator=generator).to(logs.device)
        logs.gather(1, drawn).sum().backward()
    gradient: torch.Tensor | None = leaf.grad
    assert gradient is not None, "a text without positions has no gradient"
    return gradient


def mix(
    metrics: Sequence[Mapping[Place, torch.Tensor]], covariances: Mapping[Place, torch.Tensor]
) -> dict[Place, torch.Tensor]:
    """The sum of several metrics `[KV heads, D, D]`, each divided by what is lost, by that metric,
    if no bits are spent on rows with these covariances `[KV heads, D, D]`."""
    mixed = {place: torch.zeros_like(covariance) for place, covariance in covariances.items()}
    for its in metrics:
        lost = sum((its[place] * covariance).sum() for place, covariance in covariances.items())
        for place in covariances if lost else ():  # 0 if no query reads stored rows
            mixed[place] = mixed[place] + its[place] / lost
    return mixed


def check_backward(
    model: PreTrainedModel, geometry: Geometry, ids: torch.Tensor, recipe: Recipe
) -> None:
    """Raise `UnsupportedModel` if the recipe needs a backward pass and the model cannot run one, on
    a few tokens `[T]`: its weights are not all in memory, or its kernels have no gradients."""
    if not recipe.goes_back:
        return
    hint = "give --recipe attention, which needs no gradients"
    if any(parameter.is_meta for parameter in model.parameters()):
        problem = "Fisher information needs all weights in memory, and some are not"
        raise UnsupportedModel(problem, "add: --quick")
    text, nearly_all = Text(ids, range(1, len(ids) - 1)), CacheLayout(sink=0, recent=1)
    try:
        collect_fisher(model, geometry, [text], nearly_all, draws=1)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        problem = "Fisher information needs gradients, and this model has none"
        raise UnsupportedModel(f"{problem}: {first_sentence(error)}", hint) from error


def choose_texts(
    rows: Sequence[torch.Tensor], asked: Sequence[Text], recipe: Recipe, on_cpu: bool
) -> dict[str, list[Text]]:
    """The `text` and the `answers` for Fisher information; none if the recipe needs none."""
    if not recipe.goes_back:
        return {}
    length = min(LONGEST_ON_CPU if on_cpu else LONGEST, max(map(len, rows)))
    whole = [part for row in rows for part in row.split(length) if len(part) == length]
    positions = range(sum(windows_of(recipe, length)), length - 1)
    text = [Text(row, positions) for row in whole[: max(1, TOKENS // length)]]
    return {"text": text, "answers": [*asked]}


def count_draws(recipe: Recipe) -> dict[str, int]:
    """How often tokens are drawn for each kind of text."""
    draws = recipe.draws or FEWEST
    return {"text": draws, "answers": min(draws, MOST_FOR_ANSWERS)}


def count_passes(texts: Mapping[str, Sequence[Text]], recipe: Recipe) -> int:
    """How many tokens the model could read in the time that `add_fisher` takes. A backward pass
    takes as long as two forward passes."""
    tokens, draws = 0, count_draws(recipe)
    for name, its in texts.items():
        tokens += (1 + 2 * draws[name]) * sum(len(each.ids) for each in its)
    return tokens


def add_fisher(
    statistics: Statistics,
    model: PreTrainedModel,
    geometry: Geometry,
    texts: Mapping[str, Sequence[Text]],
    recipe: Recipe,
    progress: Progress,
) -> None:
    """Add the Fisher information of each side to the statistics. Text and answers have the same
    weight. Raises `RotationZooError` if the activations of a row do not fit."""
    sink, recent = windows_of(recipe, len(texts["text"][0].ids))
    cache, total = CacheLayout(sink=sink, recent=recent), sum(map(len, texts.values()))
    found, covariances, draws, done = [], {}, count_draws(recipe), itertools.count()
    count = sum(len(each.positions) for each in itertools.chain(*texts.values()))

    def told(its: Sequence[Text]) -> Iterator[Text]:
        for text in its:
            progress("measuring what errors cost", next(done), total)
            yield text

    for name, its in texts.items():
        given = told(its), cache, draws[name], recipe.seed
        try:
            found.append(collect_fisher(model, geometry, *given))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            length = len(its[0].ids)
            problem = f"the activations of {length:,} tokens do not fit the device's memory"
            hint = f"add: --length {length // 2}, or --recipe attention"
            raise RotationZooError(problem, hint) from error
    for layer, side in found[0]:
        rows = statistics[layer][side]
        covariances[layer, side] = covariance(rows.second_moment, rows.mean).cpu()
    for (layer, side), metric in mix(found, covariances).items():
        weight = metric.new_full((len(metric),), count)
        moment = Moment(metric * count, metric.new_zeros(metric.shape[:2]), weight)
        statistics[layer][metric_kind(side)] = moment
