"""The metric of errors for models that cannot run backward: errors of attention (`C_Q` for keys,
`C_S` for values), scaled to the measured loss in nats.

The loss is measured with one side of one layer stored and all others exact. These losses nearly add
up: on a trained model of eight layers, their sum was 0.87 of the joint loss."""

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from itertools import chain
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rotationzoo.artifact.fit import fit, sum_moments
from rotationzoo.budget import EvenBudget
from rotationzoo.codec.bit_allocation import spend_bits
from rotationzoo.codec.formats import SEGMENTS
from rotationzoo.codec.rotated import RotatedCodec
from rotationzoo.errors import RotationZooError, UnsupportedModel
from rotationzoo.geometry import Geometry
from rotationzoo.linalg.moments import Moment, Statistics
from rotationzoo.linalg.transform_coding import REMAINING, SEGMENT
from rotationzoo.model import prediction
from rotationzoo.model.capture import Call, Intercept, intercept, returned_cache
from rotationzoo.model.changing_rope import reading_whole
from rotationzoo.model.latent import cached_of
from rotationzoo.model.loading import input_device
from rotationzoo.progress import Progress
from rotationzoo.recall.prompts import Prompt, PromptSettings, write_prompts
from rotationzoo.recall.questions import QUOTE, TASKS
from rotationzoo.recipe import Recipe
from rotationzoo.rotations import Rotations
from rotationzoo.sides import cost_kinds, metric_kind, rows_of

BITS = 2.0  # bits per element of the side whose loss is measured
SMALLEST = 1e-3
"""The least loss of a side, as a share of the mean: bfloat16 cannot measure very small losses."""
ASKED = ("needles", "key-value", QUOTE)  # the recall tasks whose answers are compared
QUESTIONS, LONGEST = 8, 2048  # questions of each task, and tokens of a prompt, at most
ROWS, POSITIONS = 8, 64
"""Rows of plain text to use without prompts, and the last predictions of each, at most."""
Place = tuple[int, str]  # a layer and a side
Stored = tuple[int, Intercept]
"""A layer, and an attention function that reads one side of its cache in stored form."""


class Text(NamedTuple):
    """Token ids `[T]` whose predictions count at some positions. To measure losses, earlier tokens
    are an exact prefill, and the others read a cache with the positions `stored` in 2 bits."""

    ids: torch.Tensor
    positions: Sequence[int]
    stored: slice = slice(0)

    def count_passes(self, layers: int) -> int:
        """How many tokens the model could read while all layers are measured. For both sides of
        each, the codec takes as long as the layer, and half of the layers run again."""
        first, last = self.positions[0], self.positions[-1] + 1
        return 3 * first + layers * (last - first)


def add_attention_metric(
    statistics: Statistics,
    model: PreTrainedModel,
    geometry: Geometry,
    texts: Sequence[Text],
    recipe: Recipe,
    progress: Progress,
) -> None:
    """Add `C_Q` or `C_S` of each side, scaled to the measured loss in nats per token."""
    add_attention(statistics)
    rotations = spend_bits(fit(statistics, recipe, geometry), EvenBudget(BITS))
    losses = measure_losses(model, geometry, rotations, texts, progress)
    least = SMALLEST * sum(losses.values()) / len(losses)
    for layer, side, rotation in rotations.each():
        assert rotation.costs is not None
        assert rotation.widths is not None
        left = torch.tensor(REMAINING, dtype=torch.float64)[rotation.widths]
        predicted = (rotation.costs * left.repeat_interleave(SEGMENT, dim=-1)).sum().item()
        lost = max(losses[layer, side], least)
        weight = lost / predicted if predicted else 0.0  # 0 if nothing reads it
        metric = statistics[layer][metric_kind(side)].second_moment
        statistics[layer][metric_kind(side)] = _one_row(weight * metric)


def add_attention(statistics: Statistics) -> None:
    """Add the metric of each side, unscaled."""
    for kinds in statistics.values():
        for side in rows_of(kinds).sides:
            kinds[metric_kind(side)] = _one_row(sum_moments(kinds, cost_kinds(side)))


def _one_row(metric: torch.Tensor) -> Moment:
    """A metric `[KV heads, D, D]` as the moment of one row."""
    heads, dim, _ = metric.shape
    return Moment(metric, metric.new_zeros(heads, dim), metric.new_ones(heads))


@torch.no_grad()
def measure_losses(
    model: PreTrainedModel,
    geometry: Geometry,
    rotations: Rotations,
    texts: Sequence[Text],
    progress: Progress,
) -> dict[Place, float]:
    """The mean `KL(exact || stored)` in nats per compared prediction, with one side of one layer
    stored by transform coding, minus the noise. Raises `RotationZooError` if it is not finite."""
    layers = prediction.decoder_layers(model)
    if any(layer.owner != layer.index for layer in geometry):
        layers = []  # a layer that reads another one's cache needs that one to run
    codec, plain = RotatedCodec(rotations, rounding="transform"), RotatedCodec(rotations)
    places = [(layer, side) for layer, side, _ in rotations.each()]
    losses, total = dict.fromkeys(places, 0.0), len(texts) * len(places)
    for number, text in enumerate(texts):
        stored = [_reading_stored(codec, geometry, text, place) for place in places]
        # In bfloat16, any change affects all later rounding.
        unrounded = _reading_stored(plain, geometry, text, places[0], rounds=False)
        found = _lose(model, layers, text, [unrounded, *stored])
        noise = next(found)
        for done, ((index, side), loss) in enumerate(zip(places, found, strict=True)):
            progress("measuring what each layer loses", number * len(places) + done, total)
            if not math.isfinite(loss - noise):  # a maximum of 0 and NaN is 0
                problem = f"the measured loss of {side}s in layer {index} is not finite"
                raise RotationZooError(problem, "give --quick, which measures no losses")
            losses[index, side] += max(0.0, loss - noise) / len(texts)
    return losses


@torch.no_grad()
def check_cache(model: PreTrainedModel, ids: torch.Tensor) -> None:
    """Raise `UnsupportedModel` if a model's cache counts ids `[B, T]` wrong, as MiniMax's does."""
    cache = returned_cache(model(input_ids=ids, use_cache=True))
    if cache.get_seq_length() != ids.shape[1]:
        whose = f"{type(model).__name__}, whose own cache loses count of its tokens"
        raise UnsupportedModel(f"losses are not measured for {whose}", "add: --quick")


def write_texts(
    rows: Sequence[torch.Tensor], recipe: Recipe, tokenizer: PreTrainedTokenizerBase
) -> list[Text]:
    """Prompts of `ASKED`, in the rows of token ids `[T]`, whose answers are compared. If rows are
    too short, the last tokens of the longest rows are compared."""
    longest = [row[:LONGEST] for row in sorted(rows, key=len, reverse=True)]
    length, filler = len(longest[0]), torch.cat([*rows]).tolist()
    sink, recent = windows_of(recipe, length)
    asked = []
    for task in ASKED:
        count = QUESTIONS // TASKS[task]
        asked.append(PromptSettings(task, count, length, None, sink, recent, pool="choose"))
    prompts: list[Prompt] = []
    with suppress(RotationZooError):  # rows may be too short
        prompts = [each for its in asked for each in write_prompts(its, tokenizer, filler)]
    compared = []
    for prompt in prompts:  # at the positions that predict the tokens of answers
        answers = [range(it.answer.start, it.answer.stop) for it in prompt.questions]
        compared.append((prompt.ids, [at - 1 for at in chain.from_iterable(answers)]))
    for row in longest[: 0 if prompts else ROWS]:
        last = min(POSITIONS, max(1, len(row) // 4))
        compared.append((row, [*range(len(row) - last, len(row))]))
    texts = []
    for ids, positions in compared:
        sink, recent = windows_of(recipe, len(ids))
        texts.append(Text(ids, positions, slice(sink, positions[0] - recent)))
    return texts


def windows_of(recipe: Recipe, length: int) -> tuple[int, int]:
    """The recipe's sink and recent tokens, or a quarter of a shorter row each."""
    return min(recipe.sink, length // 4), min(recipe.recent, length // 4)


def _lose(
    model: PreTrainedModel, layers: list[torch.nn.Module], text: Text, stored: Sequence[Stored]
) -> Iterator[float]:
    """The mean `KL(exact || stored)` at the compared positions of a text, for each attention."""
    ids = text.ids[None, : text.positions[0]].to(input_device(model))
    with reading_whole(model, len(text.ids)):
        cache = returned_cache(model(input_ids=ids, use_cache=True, logits_to_keep=1))
    with prediction.keeping_outputs(layers) as outputs:
        exact = _predict(model, text, cache)
    if len(outputs) != len(layers) or not all(map(torch.is_tensor, outputs)):
        layers = []  # layers cannot be skipped
    for layer, attention in stored:
        before = layers[:layer]
        leaving_out = prediction.returning(before, outputs[layer - 1]) if before else nullcontext()
        with leaving_out, intercept(model, attention):
            other = _predict(model, text, cache)
        yield prediction.divergence_of(exact, other).double().mean().item()


def _predict(model: PreTrainedModel, text: Text, cache: Any) -> torch.Tensor:
    """The logits `[P, vocabulary]` at the compared positions, with a copy of the cache."""
    start, last = text.positions[0], text.positions[-1]
    ids, cache = text.ids[None, start : last + 1], copy.deepcopy(cache)
    with reading_whole(model, len(text.ids)):
        states = prediction.run_decoder(model, ids, cache)
    return states.logits([at - start for at in text.positions])[0]


def _reading_stored(
    codec: RotatedCodec, geometry: Geometry, text: Text, place: Place, rounds: bool = True
) -> Stored:
    """Attention that reads one side of a layer's cache in 2 bits, or only rotated and back."""
    owner, side = place
    readers = {layer.index for layer in geometry if layer.owner == owner}

    def store(rows: torch.Tensor) -> torch.Tensor:
        # A cache with a sliding window has lost the first tokens.
        lost = text.positions[-1] + 1 - rows.shape[2]
        first, last = (max(0, end - lost) for end in (text.stored.start, text.stored.stop))
        exact, stored = codec.keep_exact(rows, owner, side), rows[:, :, first:last]
        if first == last:
            return exact
        if rounds:
            read = codec.fake_quantize(stored, owner, side, SEGMENTS)
        else:
            read = codec.restore(codec.rotate(stored, owner, side), owner, side).to(rows.dtype)
        return torch.cat([exact[:, :, :first], read, exact[:, :, last:]], dim=2)

    def read(call: Call) -> torch.Tensor:
        if call.layer not in readers:
            return call.run()
        cached = cached_of(call)
        sides = cached.sides
        return call.attend(call.query, *cached.read(sides | {side: store(sides[side])}))

    return owner, read
