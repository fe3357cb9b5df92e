"""What a model loses by rounding each layer's keys and values. It reads one side of one layer in
codes of 2 bits and everything else exact, and its predictions are compared with its own.

Losses of single places nearly add up: on a trained model of eight layers their sum was .87 of what
all of them cost together.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from rotationzoo.calibration.budget import COARSE
from rotationzoo.model.geometry import Geometry, cached_layers
from rotationzoo.model.prediction import run_decoder
from rotationzoo.progress import Progress
from rotationzoo.recipe import Recipe
from rotationzoo.rotations import SIDES, Rotation, Rotations
from rotationzoo.simulation.arm import Arm
from rotationzoo.simulation.layout import CacheLayout
from rotationzoo.simulation.simulated import Simulation

ROWS = 8
"""Rows of text whose predictions are compared, at most."""
POSITIONS = 64
"""Predictions of a row that are compared."""


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

    `rows` are token ids `[T]`. Each is read once exact, and once for every layer and side. Windows
    are those of the recipe, or a quarter of a shorter row.
    """
    places = [(layer.index, side) for layer in cached_layers(geometry) for side in SIDES]
    arm = Arm(recipe.name, rotations, recipe.group_size, rounding="feedback")
    longest = sorted(rows, key=len, reverse=True)[:ROWS]
    losses = dict.fromkeys(places, 0.0)
    for number, row in enumerate(longest):
        sink, recent = (min(window, len(row) // 4) for window in (recipe.sink, recipe.recent))
        cache = CacheLayout(COARSE, sink, recent)
        stride = max(1, (len(row) - sink - recent) // POSITIONS)
        compared = slice(sink + recent, None, stride)
        exact = _predict(model, row, compared)
        for done, (layer, side) in enumerate(places):
            progress("measuring what each layer loses", number * len(places) + done, 0)
            readers = {each.index for each in geometry if each.owner == layer}
            simulation = Simulation(arm, cache, geometry, readers, (side,))
            with simulation.running(model):
                stored = _predict(model, row, compared)
            losses[layer, side] += _divergence(exact, stored) / len(longest)

    def add_loss(layer: int, side: str, rotation: Rotation) -> Rotation:
        loss = torch.tensor(losses[layer, side], dtype=torch.float64)
        return replace(rotation, sensitivity=loss)

    return rotations.replace(add_loss)


@torch.no_grad()
def _predict(model: PreTrainedModel, row: torch.Tensor, positions: slice) -> torch.Tensor:
    """The log probabilities `[P, vocabulary]` that a model predicts at some positions of a row."""
    return run_decoder(model, row[None]).logits(positions)[0].float().log_softmax(-1)


def _divergence(exact: torch.Tensor, stored: torch.Tensor) -> float:
    return float((exact.exp() * (exact - stored)).sum(-1).double().mean().clamp(min=0))
