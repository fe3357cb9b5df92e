"""The clip ratios of a whole model, chosen by what the model itself loses.

What one layer's scores cannot see is that clipping shrinks every row. Errors that differ from layer
to layer average out, shrinking adds up: ratios chosen head by head come out too low. So all heads
of a side have one ratio, which is also all that most engines take, and it is judged by the
divergence of the model's predictions.
"""

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from rotationzoo.cache.arm import Arm
from rotationzoo.cache.simulated import Simulation
from rotationzoo.cache.windows import Cache
from rotationzoo.codec import int2
from rotationzoo.linalg.paired import clearly_less
from rotationzoo.model.geometry import Geometry
from rotationzoo.model.loading import input_device
from rotationzoo.progress import Progress, silent
from rotationzoo.rotations import SIDES, Rotations

_STEP = 0.02  # between clip ratios, or as many of them as it takes to clamp at another entry
POSITIONS = 256  # whose predictions are compared at a time


def search_clip(
    model: PreTrainedModel,
    geometry: Geometry,
    baseline: Rotations,
    chosen: Rotations,
    cache: Cache,
    group_size: int | None,
    rows: Sequence[torch.Tensor],
    deadline: float = math.inf,
    progress: Progress = silent,
) -> tuple[Rotations, dict[str, Any]]:
    """The keys and the values of `chosen`, or the recipe's `baseline` where the model does not
    clearly gain by them, with one clip ratio a side; and a record.

    The record has, in nats a token on the texts `rows` `[T]`, the divergence of the model's
    predictions with either or both sides chosen, and with each ratio tried. No more ratios are
    tried after `deadline` (`time.monotonic()`).
    """

    def measure(arms: Sequence[Rotations]) -> torch.Tensor:
        return divergences(
            model,
            geometry,
            [Arm(str(i), arm, group_size) for i, arm in enumerate(arms)],
            cache,
            rows,
        )

    def nearest_best(
        rotations: Rotations, side: str, ratio: float, divergence: float
    ) -> dict[float, float]:
        """Ratios tried, and their divergence: from one step by step to where neither neighbour is
        better."""
        tried = {ratio: divergence}
        rows = _channels(rotations, side, cache, group_size)
        while time.monotonic() < deadline:
            clamped = {_clamped_at(one, rows, cache) for one in tried}
            near = _beside(min(tried, key=lambda one: tried[one]), rows, cache)
            near = [r for r in near if _clamped_at(r, rows, cache) not in clamped]
            if not near:
                break
            divergence_of_near = measure([rotations.with_clip(side, one) for one in near])
            tried |= zip(near, divergence_of_near.mean(1).tolist(), strict=True)
        return tried

    progress("trimming", 0, 3)
    keys, values = (baseline.with_side(side, chosen) for side in SIDES)
    mixed = {"own": baseline, "keys": keys, "values": values, "both": chosen}
    by_text = measure(list(mixed.values()))
    best = int(by_text.mean(1).argmin())
    kept = list(mixed)[best if clearly_less(by_text[best], by_text[0]) else 0]
    rotations, by_side = mixed[kept], dict(zip(mixed, by_text.mean(1).tolist(), strict=True))
    record: dict[str, Any] = {"by_side": by_side, "kept": kept, "trimmed": by_side[kept]}
    for number, side in enumerate(("key", "value")):
        progress("trimming", 1 + number, 3)
        start = next(iter(rotations.values()))[side].clip
        tried = nearest_best(rotations, side, round(start[0].item(), 4), record["trimmed"])
        ratio = min(tried, key=lambda one: tried[one])
        rotations = rotations.with_clip(side, ratio)
        record[side] = {"clip": ratio, "by_clip": {f"{one:g}": tried[one] for one in sorted(tried)}}
        record["trimmed"] = tried[ratio]
    progress("trimming", 3, 3)
    return rotations, record


def _beside(ratio: float, channels: set[int], cache: Cache) -> list[float]:
    """The next ratios below and above that clamp at another entry: of 16 sorted magnitudes, .90 and
    .92 take the same."""
    near = []
    for step in (-_STEP, _STEP):
        other = round(ratio + step, 4)
        while 0 < other <= 1 and _clamped_at(other, channels, cache) == _clamped_at(
            ratio, channels, cache
        ):
            other = round(other + step, 4)
        near += [other] if 0 < other <= 1 else []
    return near


def _clamped_at(ratio: float, channels: set[int], cache: Cache) -> tuple[float, ...]:
    """Where rows of so many channels are clamped, among their sorted magnitudes."""
    places = (
        int2.clip_position(ratio, count, cache.format.interpolated) for count in sorted(channels)
    )
    return tuple(entry.item() + weight.item() for entry, weight in places)


def _channels(rotations: Rotations, side: str, cache: Cache, group_size: int | None) -> set[int]:
    """The numbers of channels that share a threshold."""
    dims = {sides[side].dim for sides in rotations.values()}
    return {group_size or dim for dim in dims} if cache.format.clip_scope == "group" else dims


@torch.no_grad()
def divergences(
    model: PreTrainedModel,
    geometry: Geometry,
    arms: Sequence[Arm],
    cache: Cache,
    rows: Sequence[torch.Tensor],
) -> torch.Tensor:
    """KL of the exact model's predictions to those of each arm, mean over the positions that read
    stored tokens, in nats: `[arms, texts]`, float64. Texts too short to store anything are left
    out."""
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
    for p, q in zip(exact.split(POSITIONS), other.split(POSITIONS), strict=True):
        p, q = p.float().log_softmax(-1), q.float().log_softmax(-1)
        by_position = torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)
        total += by_position.double().sum().cpu()
    return total / len(exact)
