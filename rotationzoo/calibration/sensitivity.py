"""What a model loses by rounding each layer's keys and values. It reads one side of one layer in
codes of 2 bits and everything else exact, and its predictions are compared with its own.

Losses of single places nearly add up: on a trained model of eight layers their sum was .87 of what
all of them cost together.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from rotationzoo.codec.budget import COARSE
from rotationzoo.codec.layout import CacheLayout
from rotationzoo.codec.rotated import RotatedCodec
from rotationzoo.errors import RotationZooError
from rotationzoo.geometry import Geometry
from rotationzoo.model.prediction import (
    decoder_layers,
    divergence_of,
    keeping_outputs,
    returning,
    run_decoder,
)
from rotationzoo.progress import Progress
from rotationzoo.recipe import Recipe
from rotationzoo.rotations import Rotation, Rotations
from rotationzoo.simulation.simulated import Simulation

ROWS, LONGEST = 8, 4096
"""Rows of text whose predictions are compared, and their tokens, at most."""
POSITIONS = 64
"""Predictions of a row that are compared, about."""


def measure_sensitivities(
    model: PreTrainedModel,
    geometry: Geometry,
    rotations: Rotations,
    rows: Sequence[torch.Tensor],
    recipe: Recipe,
    progress: Progress,
) -> Rotations:
    """The rotations with the sensitivity of each layer and side: the mean `KL(exact || stored)` of
    the model's predictions, in nats a token.

    The longest rows of token ids `[T]` are read, once exact and once for every layer and side.
    Layers before it are left out then: what they return is kept from the exact run. Windows are
    those of the recipe, or a quarter of a shorter row. Raises `RotationZooError` for predictions
    that are not finite.
    """
    places = [(layer, side) for layer, side, _ in rotations.each()]
    readers: dict[int, set[int]] = {}
    for layer in geometry:
        readers.setdefault(layer.owner, set()).add(layer.index)
    layers = decoder_layers(model)
    if any(layer.owner != layer.index for layer in geometry):
        layers = []  # a layer that reads another one's cache needs it to run
    codec = RotatedCodec(rotations, recipe.group_size, rounding="feedback")
    longest = [row[:LONGEST] for row in sorted(rows, key=len, reverse=True)[:ROWS]]
    losses = dict.fromkeys(places, 0.0)
    done, total = 0, len(longest) * len(places)
    for row in longest:
        sink, recent = (min(window, len(row) // 4) for window in (recipe.sink, recipe.recent))
        cache = CacheLayout(COARSE, sink, recent)
        with keeping_outputs(layers, _keep_in_main_memory) as outputs:
            exact = _predict(model, row, cache.first_quantized)
        if len(outputs) != len(layers):
            layers = []  # they do not run once each, so a later one cannot stand for them
        unchanged = Simulation(codec, cache, geometry, readers[places[0][0]], sides=())
        # In bfloat16, even an exact simulation differs from the model a little.
        noise = _measure_loss(model, row, exact, unchanged)
        for index, side in places:
            progress("measuring what each layer loses", done, total)
            simulation = Simulation(codec, cache, geometry, readers[index], (side,))
            with _leaving_out(layers[:index], outputs):
                loss = _measure_loss(model, row, exact, simulation) - noise
            if not math.isfinite(loss):  # a maximum of 0 and NaN is 0
                raise RotationZooError(
                    f"what {side}s of layer {index} lose is not finite", hint="--dtype float32"
                )
            # Quality was measured with rows clamped one by one (docs/quality.md).
            losses[index, side] += max(0.0, loss) / len(longest)
            done += 1

    def add_loss(layer: int, side: str, rotation: Rotation) -> Rotation:
        loss = torch.tensor(losses[layer, side], dtype=torch.float64)
        return replace(rotation, sensitivity=loss)

    return rotations.replace(add_loss)


def _keep_in_main_memory(states: object) -> tuple[torch.Tensor, torch.device] | None:
    """A layer's output with the device that it was on; None if it is more than a tensor."""
    if not isinstance(states, torch.Tensor):
        return None
    return states.cpu(), states.device


def _leaving_out(
    layers: list[torch.nn.Module], outputs: list[tuple[torch.Tensor, torch.device] | None]
) -> AbstractContextManager[None]:
    """A context in which these first layers of the model do not run, and return what the last of
    them has returned before. All run where that is not one tensor."""
    kept = outputs[len(layers) - 1] if layers else None
    if kept is None:
        return nullcontext()
    states, device = kept
    return returning(layers, states.to(device))


def _measure_loss(
    model: PreTrainedModel, row: torch.Tensor, exact: torch.Tensor, simulation: Simulation
) -> float:
    """`KL(exact || stored)` of a row's predictions in a simulation."""
    with simulation.running(model):
        stored = _predict(model, row, simulation.cache.first_quantized)
    return float(divergence_of(exact, stored).double().mean())


@torch.no_grad()
def _predict(model: PreTrainedModel, row: torch.Tensor, first: int) -> torch.Tensor:
    """The logits `[P, vocabulary]` of a model at some positions of a row, evenly spread from
    `first` on."""
    positions = slice(first, None, max(1, (len(row) - first) // POSITIONS))
    return run_decoder(model, row[None]).logits(positions)[0]
