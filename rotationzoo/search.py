"""Choosing rotations and clip ratios, head by head, on calibration text that the statistics have not seen.

Keys are scored by the KL of their attention, values by what they change in the block's output; `docs/quality.md` shows that
both predict what the model loses. Whatever is not clearly better than the recipe's own rotation is left out.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from rotationzoo import int2, rotation
from rotationzoo.candidates import candidates
from rotationzoo.collect import Progress, silent
from rotationzoo.errors import RotationZooError
from rotationzoo.geometry import Geometry, Layer, cached_layers
from rotationzoo.moments import Statistics
from rotationzoo.recipe import Recipe, Search
from rotationzoo.refine import learn, straight_through
from rotationzoo.sample import Sample, output_projections, take
from rotationzoo.simulate import Cache, stored

RATIOS = (1.0, 0.98, 0.96, 0.94, 0.92, 0.9, 0.88, 0.85, 0.82, 0.78, 0.74, 0.7, 0.6, 0.5)
_SCREEN_RATIOS, _SCREEN_TEXTS, _FINALISTS = (0.96, 0.9, 0.84, 0.75, 0.6), 2, 4
_BATCH = 8  # rotations tried at once
_BYTES = 4e9  # of samples held at a time

Score = Callable[[Sample, torch.Tensor], torch.Tensor]
"""A sample, and rows `[S, H, T, D]` as they come back from the cache -> `[S, H]`, less is better."""


@dataclass
class Side:
    """What is tried for one side of one layer: `matrix` `[H, D, D]` float32, `mean` `[H, D]`, `clip` `[H]` float64."""

    matrix: torch.Tensor
    mean: torch.Tensor
    clip: torch.Tensor
    names: list[str]
    """Of the candidate of each head."""
    scores: torch.Tensor
    """On the held-out texts, `[texts, H]`."""
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
    """The search in one layer. What is tried comes in batches: rotations `[S, H, D, D]`, clip ratios `[S, H]`, scores
    `[texts, S, H]`."""

    def __init__(
        self, layer: Layer, statistics: Statistics, judge: list[Sample], teach: list[Sample], recipe: Recipe, settings: Search
    ):
        self.layer, self.recipe, self.settings = layer, recipe, settings
        self.judge, self.teach = judge, teach
        self.moments = statistics[layer.index]
        self.form = int2.FORMATS[settings.format]
        self.device = judge[0].key.device
        self.heads = torch.arange(layer.kv_heads)

    def keys(self, deadline: float | None) -> Side:
        mean = self.moments["key"].mean.cpu()
        stored = self.moments["key"].second_moment.cpu()
        if self.recipe.center_keys:
            stored = stored - mean.unsqueeze(-1) * mean.unsqueeze(-2)
        else:
            mean = torch.zeros_like(mean)

        def score(sample: Sample, rows: torch.Tensor) -> torch.Tensor:
            return sample.divergence(sample.attention(rows)[0])

        return self._side("key", candidates(stored, self.moments["query"].second_moment.cpu()), mean, score, deadline)

    def values(self, key: Side, deadline: float | None) -> Side:
        with torch.no_grad():
            parts = {
                id(sample): sample.attention(self._back(sample.key, key.matrix[None], key.mean, key.clip[None]))[1]
                for sample in (*self.judge, *self.teach)
            }

        def score(sample: Sample, rows: torch.Tensor) -> torch.Tensor:
            return sample.error(rows, parts[id(sample)])

        moment = self.moments["value"]
        found = candidates(moment.second_moment.cpu(), self._output_metric())
        return self._side("value", found, torch.zeros_like(moment.mean).cpu(), score, deadline)

    def _output_metric(self) -> torch.Tensor:
        """The metric of a value's error behind the output projection, `[H, D_v, D_v]` float64."""
        projection, heads = self.judge[0].projection, len(self.heads)
        if projection is None:
            return rotation.identity(self.layer.value_dim).expand(heads, -1, -1)
        own = projection.cpu().double().unflatten(0, (heads, -1))
        return (own @ own.mT).sum(1)

    def _side(
        self, side: str, found: dict[str, torch.Tensor], mean: torch.Tensor, score: Score, deadline: float | None
    ) -> Side:
        mean = mean.float().to(self.device)
        own = self._own(side, mean, score)
        starts = self._closed_forms(side, found, mean, score)
        chosen = _better(own, starts[0])
        record: dict[str, Any] = {
            "own": own.scores.mean(0).tolist(), "candidate": chosen.names, "closed": chosen.scores.mean(0).tolist()
        }  # fmt: skip
        if self.settings.steps and self.teach:
            learned, curve = self._learn(side, starts[: self.settings.starts], score, deadline)
            for start in learned:
                chosen = _better(chosen, start)
            record |= {"learned": ["learned" in name for name in chosen.names], "curve": curve}
        by_ratio = self._scores(side, chosen.matrix.expand(len(RATIOS), -1, -1, -1), mean, _every_ratio(self.heads), score)
        record |= {
            "clip": chosen.clip.tolist(), "chosen": chosen.scores.mean(0).tolist(), "by_clip": by_ratio.mean(0).sum(-1).tolist()
        }  # fmt: skip
        return replace(chosen, record=record)

    def _own(self, side: str, mean: torch.Tensor, score: Score) -> Side:
        """What the recipe makes without a search."""
        recipe = self.recipe
        kind, ratio = (recipe.key_statistic, recipe.key_clip) if side == "key" else (recipe.value_statistic, recipe.value_clip)
        basis = rotation.eigenbasis(self.moments[kind].second_moment)[1]
        matrix = rotation.compose(basis, recipe.composition, recipe.group(basis.shape[-1])).float().to(self.device)
        clip = torch.full((len(self.heads),), ratio, dtype=torch.float64)
        scores = self._scores(side, matrix[None], mean, clip[None], score)[:, 0]
        return Side(matrix, mean, clip, ["own"] * len(self.heads), scores)

    def _closed_forms(self, side: str, found: dict[str, torch.Tensor], mean: torch.Tensor, score: Score) -> list[Side]:
        """Each head's best candidates with their clip ratios, best first.

        All are tried on two texts at a few ratios; those that do best there on all texts at every ratio.
        """
        names, matrices = list(found), torch.stack(list(found.values())).float().to(self.device)
        screen = torch.tensor(_SCREEN_RATIOS, dtype=torch.float64)
        table = self._scores(
            side,
            matrices.repeat_interleave(len(screen), 0),
            mean,
            screen.repeat(len(names))[:, None].expand(-1, len(self.heads)),
            score,
            texts=_SCREEN_TEXTS,
        )
        screened = table.mean(0).unflatten(0, (len(names), -1)).amin(1).cpu()
        sides = []
        for which in screened.argsort(0)[: max(_FINALISTS, self.settings.starts)]:
            matrix = matrices[which.to(self.device), self.heads.to(self.device)]
            scores = self._scores(side, matrix.expand(len(RATIOS), -1, -1, -1), mean, _every_ratio(self.heads), score)
            best = scores.mean(0).argmin(0).cpu()
            clip = torch.tensor(RATIOS, dtype=torch.float64)[best]
            start = Side(matrix, mean, clip, [names[i] for i in which.tolist()], scores[:, best, self.heads])
            sides.append(self._fine(side, start, score))
        rank = torch.stack([start.scores.mean(0) for start in sides]).argsort(0)
        return [_pick(sides, which.cpu()) for which in rank]

    def _fine(self, side: str, start: Side, score: Score) -> Side:
        """The clip ratios one and two channels around."""
        dim = start.matrix.shape[-1]
        channels = self.recipe.group(dim) if self.form.clip_scope == "group" else dim
        tried = (start.clip + torch.tensor([-2, -1, 1, 2])[:, None] / channels).clamp(1 / channels, 1)
        found = self._scores(side, start.matrix.expand(len(tried), -1, -1, -1), start.mean, tried, score)
        around = [replace(start, clip=clip, scores=scores) for clip, scores in zip(tried, found.unbind(1), strict=True)]
        every = [start, *around]
        return _pick(every, torch.stack([one.scores.mean(0) for one in every]).argmin(0).cpu())

    def _learn(
        self, side: str, starts: Sequence[Side], score: Score, deadline: float | None
    ) -> tuple[list[Side], list[list[float]]]:
        """Learned rotations from several starts at once, with the curve of their losses."""
        mean, clip = starts[0].mean, torch.stack([start.clip for start in starts])

        def loss(sample: Sample, matrix: torch.Tensor) -> torch.Tensor:
            return score(sample, self._back(self._rows(sample, side), matrix, mean, clip))

        matrix = torch.stack([start.matrix for start in starts])
        learned, curve = learn(self.teach, matrix, loss, self.settings.steps, self.settings.rate, deadline=deadline)
        scores = self._scores(side, learned, mean, clip, score)
        found = [
            self._fine(
                side,
                replace(start, matrix=one, scores=found, names=[f"{name}, learned" for name in start.names]),
                score,
            )
            for start, one, found in zip(starts, learned, scores.unbind(1), strict=True)
        ]
        return found, curve[:: max(1, len(curve) // 20)]

    def _back(self, rows: torch.Tensor, matrix: torch.Tensor, mean: torch.Tensor, clip: torch.Tensor) -> torch.Tensor:
        return stored(rows, matrix, mean, clip, self.recipe.group_size, self.form, straight_through)

    def _rows(self, sample: Sample, side: str) -> torch.Tensor:
        return sample.key if side == "key" else sample.value

    @torch.no_grad()
    def _scores(
        self,
        side: str,
        matrix: torch.Tensor,
        mean: torch.Tensor,
        clip: torch.Tensor,
        score: Score,
        texts: int | None = None,
    ) -> torch.Tensor:
        """On the held-out texts, `[texts, S, H]`."""
        parts = list(zip(matrix.split(_BATCH), clip.split(_BATCH), strict=True))
        return torch.stack(
            [
                torch.cat([score(s, self._back(self._rows(s, side), one, mean, ratio)) for one, ratio in parts])
                for s in self.judge[:texts]
            ]
        )


def _every_ratio(heads: torch.Tensor) -> torch.Tensor:
    return torch.tensor(RATIOS, dtype=torch.float64)[:, None].expand(-1, len(heads))


def _better(there: Side, candidate: Side) -> Side:
    """The candidate in the heads where it is clearly better."""
    return _pick([there, candidate], _clearly_less(candidate.scores, there.scores).long().cpu())


def _pick(found: Sequence[Side], which: torch.Tensor) -> Side:
    """Head by head, the one of number `which` `[H]`."""
    heads = torch.arange(len(which))
    return Side(
        torch.stack([side.matrix for side in found])[which, heads],
        found[0].mean,
        torch.stack([side.clip for side in found])[which, heads],
        [found[i].names[head] for head, i in enumerate(which.tolist())],
        torch.stack([side.scores for side in found])[which, :, heads].T,
    )


def shared_clip(record: dict[str, Any], side: str) -> float:
    """The one ratio of the coarse ones that costs least over all layers, for engines that take no other."""
    totals = torch.tensor([layer[side]["by_clip"] for layer in record.values()]).sum(0)
    return RATIOS[int(totals.argmin())]


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
