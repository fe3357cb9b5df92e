"""Clip ratios of a whole model, moved by what the model itself loses.

What one layer's scores cannot see is that clipping shrinks every row. Errors that differ from layer to layer average out,
shrinking adds up; so the ratios of all heads are moved together, a side at a time, and judged by the divergence of the
model's predictions.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from rotationzoo.collect import Progress, silent
from rotationzoo.geometry import Geometry
from rotationzoo.models import input_device
from rotationzoo.simulate import Arm, Cache, Simulation

SHIFTS = (-0.04, -0.02, 0.0, 0.02, 0.04, 0.06, 0.08)
SHARED = (0.8, 0.84, 0.86, 0.88, 0.9, 0.92, 0.94, 0.96)
_POSITIONS = 256  # whose predictions are compared at a time

Tensors = dict[str, torch.Tensor]


def trim(
    model: PreTrainedModel,
    geometry: Geometry,
    own: Tensors,
    chosen: Tensors,
    cache: Cache,
    group_size: int | None,
    rows: Sequence[torch.Tensor],
    progress: Progress = silent,
) -> tuple[Tensors, dict[str, Any]]:
    """`chosen` with its clip ratios moved, or the recipe's `own` tensors where that is not clearly better; and a record.

    The record has, in nats a token on the texts `rows` `[T]`, the divergence of the model's predictions with the tensors of the
    recipe, with those chosen, with each shift tried, and with one ratio for all heads of a side; `shared_clip` is the best of
    the last, for engines that take no other.
    """

    def measure(stage: str, arms: Sequence[Tensors]) -> torch.Tensor:
        progress("trimming", done[stage], len(done))
        return divergences(model, geometry, [Arm(str(i), arm, group_size) for i, arm in enumerate(arms)], cache, rows)

    done = {name: i for i, name in enumerate(("model", "key", "value", "one key", "one value"))}
    before, after = measure("model", [own, chosen])
    record: dict[str, Any] = {"own": before.mean().item(), "chosen": after.mean().item()}
    if not clearly_less(after, before):
        return own, record | {"kept": "own", "shared_clip": {side: _highest(own, side) for side in ("key", "value")}}
    tensors = chosen
    for side in ("key", "value"):
        arms = [_moved(tensors, side, shift) for shift in SHIFTS]
        found = measure(side, arms)
        best = int(found.mean(1).argmin())
        if clearly_less(found[best], found[SHIFTS.index(0.0)]):
            tensors = arms[best]
        else:
            best = SHIFTS.index(0.0)
        record[side] = {"shift": SHIFTS[best], "by_shift": found.mean(1).tolist()}
        record["trimmed"] = found[best].mean().item()
    one = tensors
    for side in ("key", "value"):
        arms = [_uniform(one, side, ratio) for ratio in SHARED]
        found = measure(f"one {side}", arms).mean(1)
        one = arms[int(found.argmin())]
        record[side] |= {"by_shared": found.tolist()}
        record.setdefault("shared_clip", {})[side] = SHARED[int(found.argmin())]
        record["shared"] = found.min().item()
    progress("trimming", len(done), len(done))
    return tensors, record


@torch.no_grad()
def divergences(
    model: PreTrainedModel, geometry: Geometry, arms: Sequence[Arm], cache: Cache, rows: Sequence[torch.Tensor]
) -> torch.Tensor:
    """KL of the exact model's predictions to those of each arm, mean over the positions that read stored tokens, in nats:
    `[arms, texts]`, float64. Texts too short to store anything are left out."""
    layers = {layer.index for layer in geometry}
    found = []
    for row in (row for row in rows if len(row) > cache.first_quantized):
        kept = len(row) - cache.first_quantized

        def predict(row: torch.Tensor = row, kept: int = kept) -> torch.Tensor:
            ids = row[None].to(input_device(model))
            return model(input_ids=ids, use_cache=False, logits_to_keep=kept).logits[0, -kept:]

        exact = predict()
        of_arms = []
        for arm in arms:
            with Simulation(arm, cache, geometry, layers).running(model):
                of_arms.append(_divergence(exact, predict()))
        found.append(torch.stack(of_arms))
    return torch.stack(found, dim=1)


def _divergence(exact: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for p, q in zip(exact.split(_POSITIONS), other.split(_POSITIONS), strict=True):
        p, q = p.float().log_softmax(-1), q.float().log_softmax(-1)
        total += (p.exp() * (p - q)).sum(-1).double().sum().cpu()
    return total / len(exact)


def _moved(tensors: Mapping[str, torch.Tensor], side: str, shift: float) -> Tensors:
    return {
        name: (tensor + shift).clamp(_least(tensors, name), 1) if name.endswith(f"{side}.clip") else tensor
        for name, tensor in tensors.items()
    }


def _uniform(tensors: Mapping[str, torch.Tensor], side: str, ratio: float) -> Tensors:
    return {
        name: torch.full_like(tensor, ratio) if name.endswith(f"{side}.clip") else tensor for name, tensor in tensors.items()
    }


def _highest(tensors: Mapping[str, torch.Tensor], side: str) -> float:
    return max(tensor.max().item() for name, tensor in tensors.items() if name.endswith(f"{side}.clip"))


def _least(tensors: Mapping[str, torch.Tensor], name: str) -> float:
    """The ratio of a single channel."""
    return 1 / tensors[name.removesuffix("clip") + "rotation"].shape[-1]


def clearly_less(after: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Boolean `[...]`: whether scores `[texts, ...]` are lower by more than a standard error of their paired difference."""
    difference = after - before
    error = difference.std(0) / len(difference) ** 0.5 if len(difference) > 1 else torch.zeros_like(difference[0])
    return difference.mean(0) < -error
