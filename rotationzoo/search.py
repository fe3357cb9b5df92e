"""Choosing rotations and clip ratios, head by head, on calibration text that the statistics have not seen.

Keys are scored by the KL of their attention, values by what they change in the block's output; `docs/quality.md` shows that
both predict what the model loses. Whatever is not clearly better than the recipe's own rotation is left out.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from rotationzoo import int2
from rotationzoo.candidates import candidates
from rotationzoo.collect import Progress, silent
from rotationzoo.errors import RotationZooError
from rotationzoo.geometry import Geometry, Layer, cached_layers
from rotationzoo.moments import Statistics
from rotationzoo.recipe import Recipe, Search
from rotationzoo.refine import learn, straight_through
from rotationzoo.sample import Sample, output_projections, take
from rotationzoo.simulate import Cache, stored

COARSE = (1.0, 0.98, 0.96, 0.94, 0.92, 0.9, 0.88, 0.85, 0.82, 0.78, 0.74, 0.7, 0.6, 0.5)
_BYTES = 4e9  # of samples held at a time

Score = Callable[[Sample, torch.Tensor], torch.Tensor]
"""A sample, and rows as they come back from the cache -> `[H]`, less is better."""


@dataclass
class Side:
    """What has been chosen for one side of one layer: `matrix` `[H, D, D]` float32, `mean` `[H, D]`, `clip` `[H]` float64."""

    matrix: torch.Tensor
    mean: torch.Tensor
    clip: torch.Tensor
    record: dict[str, Any] = field(default_factory=dict)


def search(
    model: PreTrainedModel,
    geometry: Geometry,
    statistics: Statistics,
    fitted: Sequence[torch.Tensor],
    held_out: Sequence[torch.Tensor],
    recipe: Recipe,
    deadline: float | None = None,
    progress: Progress = silent,
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors to put in the place of the recipe's own, and a record of what was chosen and why.

    `fitted` and `held_out` are token rows; learning uses the first, every choice the second. `deadline` (`time.monotonic()`)
    cuts learning short. Raises `RotationZooError` where no held-out text is longer than the cache's windows.
    """
    settings = recipe.search
    assert settings is not None
    cache = Cache(int2.FORMATS[settings.format], recipe.sink, recipe.recent)
    projections = output_projections(model, geometry)
    layers = cached_layers(geometry)
    chosen: dict[str, torch.Tensor] = {}
    record: dict[str, Any] = {}
    done = 0
    for group in _groups(layers, [*fitted, *held_out]):
        indices = {layer.index for layer in group}
        judge = take(model, geometry, held_out, cache, settings.queries, indices, projections, seed=1)
        teach = take(model, geometry, fitted, cache, settings.queries, indices, projections, seed=2) if settings.steps else {}
        for layer in group:
            if not judge[layer.index]:
                raise RotationZooError(
                    f"no held-out row is longer than {cache.first_quantized} tokens", hint="give longer rows with --length"
                )
            progress("searching", done, 2 * len(layers))
            pace = _pace(deadline, 2 * len(layers) - done)
            one = _Layer(layer, statistics, judge[layer.index], teach.get(layer.index, []), recipe, settings)
            key = one.keys(pace)
            progress("searching", done := done + 1, 2 * len(layers))
            value = one.values(key, _pace(deadline, 2 * len(layers) - done))
            done += 1
            for name, side in (("key", key), ("value", value)):
                prefix = f"layers.{layer.index}.{name}"
                chosen[f"{prefix}.rotation"], chosen[f"{prefix}.clip"] = side.matrix.cpu().contiguous(), side.clip.cpu()
                record.setdefault(str(layer.index), {})[name] = side.record
    progress("searching", done, 2 * len(layers))
    return chosen, record


class _Layer:
    """The search in one layer."""

    def __init__(
        self, layer: Layer, statistics: Statistics, judge: list[Sample], teach: list[Sample], recipe: Recipe, settings: Search
    ):
        self.layer, self.recipe, self.settings = layer, recipe, settings
        self.judge, self.teach = judge, teach
        self.moments = statistics[layer.index]
        self.form = int2.FORMATS[settings.format]
        self.device = judge[0].key.device

    def keys(self, deadline: float | None) -> Side:
        mean = self.moments["key"].mean.float().to(self.device)
        mean = mean if self.recipe.center_keys else torch.zeros_like(mean)

        def score(sample: Sample, rows: torch.Tensor) -> torch.Tensor:
            return sample.divergence(sample.attention(rows)[0])

        side = self._choose("key", mean, score)
        return self._learn("key", side, score, deadline)

    def values(self, key: Side, deadline: float | None) -> Side:
        with torch.no_grad():
            parts = {
                id(sample): sample.attention(self._stored(sample.key, key.matrix, key.mean, key.clip))[1]
                for sample in (*self.judge, *self.teach)
            }
        mean = torch.zeros(self.layer.kv_heads, self.layer.value_dim, device=self.device)

        def score(sample: Sample, rows: torch.Tensor) -> torch.Tensor:
            return sample.error(rows, parts[id(sample)])

        side = self._choose("value", mean, score)
        return self._learn("value", side, score, deadline)

    def _stored(self, rows: torch.Tensor, matrix: torch.Tensor, mean: torch.Tensor, clip: torch.Tensor) -> torch.Tensor:
        return stored(rows, matrix, mean, clip, self.recipe.group_size, self.form, straight_through)

    def _rows(self, sample: Sample, side: str) -> torch.Tensor:
        return sample.key if side == "key" else sample.value

    @torch.no_grad()
    def _scores(self, side: str, matrix: torch.Tensor, mean: torch.Tensor, clip: torch.Tensor, score: Score) -> torch.Tensor:
        """On every held-out text, `[texts, H]`."""
        return torch.stack([score(s, self._stored(self._rows(s, side), matrix, mean, clip)) for s in self.judge])

    def _choose(self, side: str, mean: torch.Tensor, score: Score) -> Side:
        """The best closed-form candidate and clip ratio of each head, or the recipe's own where that is not clearly worse."""
        own = self.recipe.key_statistic if side == "key" else self.recipe.value_statistic
        found = candidates(self.moments, side, self.recipe.composition, self.recipe.group_size)
        found = {name: matrix.float().to(self.device) for name, matrix in found.items()}
        heads, base = mean.shape[0], own if own in found else next(iter(found))
        every = torch.arange(heads, device=self.device)
        clip = torch.full((heads,), self.recipe.key_clip if side == "key" else self.recipe.value_clip, dtype=torch.float64)
        before = self._scores(side, found[base], mean, clip, score)
        names = [name for name in found for _ in COARSE]
        clips = torch.tensor([ratio for _ in found for ratio in COARSE], dtype=torch.float64)
        table = torch.stack(
            [
                self._scores(side, found[name], mean, ratio.expand(heads), score)
                for name, ratio in zip(names, clips, strict=True)
            ]
        )
        best = table.mean(1).argmin(0)
        matrices = torch.stack(list(found.values()))
        matrix = matrices[best // len(COARSE), every]
        clip_found, after = clips[best.cpu()], table[best, :, every].T
        clip_found, after = self._fine(side, matrix, mean, clip_found, after, score)
        take_it = _clearly_less(after, before)
        which = [names[i] for i in best.tolist()]
        result = Side(
            torch.where(take_it[:, None, None], matrix, found[base]), mean, torch.where(take_it.cpu(), clip_found, clip)
        )
        after = torch.where(take_it, after, before)
        result.record = {
            "candidate": [name if yes else base for name, yes in zip(which, take_it.tolist(), strict=True)],
            "clip": result.clip.tolist(),
            "own": before.mean(0).tolist(),
            "chosen": after.mean(0).tolist(),
            # Of the first candidate of each head at the coarse ratios: what one ratio for all layers is chosen from.
            "by_clip": table.unflatten(0, (len(found), -1)).mean(2).amin(0).sum(-1).tolist(),
        }
        return result

    def _fine(
        self,
        side: str,
        matrix: torch.Tensor,
        mean: torch.Tensor,
        clip: torch.Tensor,
        scores: torch.Tensor,
        score: Score,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The clip ratios one and two channels around the coarse ones."""
        channels = self.recipe.group(matrix.shape[-1]) if self.form.clip_scope == "group" else matrix.shape[-1]
        start = clip.clone()
        for channel in (-2, -1, 1, 2):
            tried = (start + channel / channels).clamp(1 / channels, 1)
            found = self._scores(side, matrix, mean, tried, score)
            better = found.mean(0) < scores.mean(0)
            clip, scores = torch.where(better.cpu(), tried, clip), torch.where(better, found, scores)
        return clip, scores

    def _learn(self, side: str, chosen: Side, score: Score, deadline: float | None) -> Side:
        """A learned rotation for the heads in which it is clearly better on held-out text."""
        if not self.settings.steps or not self.teach or (deadline is not None and time.monotonic() > deadline):
            return chosen
        clip = chosen.clip.to(self.device)

        def loss(sample: Sample, matrix: torch.Tensor) -> torch.Tensor:
            return score(sample, self._stored(self._rows(sample, side), matrix, chosen.mean, clip))

        matrix, curve = learn(self.teach, chosen.matrix, loss, self.settings.steps, self.settings.rate, deadline=deadline)
        before = self._scores(side, chosen.matrix, chosen.mean, chosen.clip, score)
        after = self._scores(side, matrix, chosen.mean, chosen.clip, score)
        take_it = _clearly_less(after, before)
        chosen.record |= {
            "learned": take_it.tolist(),
            "after_learning": after.mean(0).tolist(),
            "curve": curve[:: max(1, len(curve) // 20)],
        }
        return Side(torch.where(take_it[:, None, None], matrix, chosen.matrix), chosen.mean, chosen.clip, chosen.record)


def shared_clip(record: dict[str, Any], side: str) -> float:
    """The one ratio of the coarse ones that costs least over all layers, for engines that take no other."""
    totals = torch.tensor([layer[side]["by_clip"] for layer in record.values()]).sum(0)
    return COARSE[int(totals.argmin())]


def _clearly_less(after: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Boolean `[H]`: whether scores `[texts, H]` are lower by more than a standard error of their paired difference."""
    difference = after - before
    error = difference.std(0) / len(difference) ** 0.5 if len(difference) > 1 else torch.zeros_like(difference[0])
    return difference.mean(0) < -error


def _groups(layers: Sequence[Layer], rows: Sequence[torch.Tensor]) -> list[list[Layer]]:
    """Layers whose samples fit in memory together: float32 keys and values of every row."""
    tokens = sum(len(row) for row in rows)
    groups: list[list[Layer]] = []
    used = 0.0
    for layer in layers:
        size = 4.0 * tokens * layer.kv_heads * (layer.key_dim + layer.value_dim)
        if not groups or used + size > _BYTES:
            groups.append([])
            used = 0.0
        groups[-1].append(layer)
        used += size
    return groups


def _pace(deadline: float | None, left: int) -> float | None:
    """When the next of `left` equal parts should be done."""
    now = time.monotonic()
    return None if deadline is None else now + max(0.0, deadline - now) / left
