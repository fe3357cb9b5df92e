"""Choosing the rotations of one layer, head by head, on calibration text that the statistics have
not seen.

Keys are scored by the KL of their attention and by what they change in the block's output, values
by the latter, each relative to the recipe's own rotation: 1 is as good as that. `docs/quality.md`
shows that both predict what the model loses.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rotationzoo.cache.arm import fake_quantize
from rotationzoo.calibration.search.closed_forms import closed_forms
from rotationzoo.calibration.search.learn import learn, straight_through
from rotationzoo.calibration.search.samples import QuerySample
from rotationzoo.codec import int2
from rotationzoo.linalg import compositions
from rotationzoo.linalg.moments import Moment
from rotationzoo.linalg.paired import clearly_less
from rotationzoo.model.geometry import Layer
from rotationzoo.recipe import Recipe
from rotationzoo.rotations import LayerRotations

_LEARNED = ", learned"
BATCH = 8  # rotations tried at once

Score = Callable[[QuerySample, torch.Tensor], torch.Tensor]
"""A sample, and rows `[S, H, T, D]` as they come back from the cache -> `[S, H]`, less is
better."""


@dataclass
class Side:
    """What is tried for one side of one layer: rotations `[H, D, D]` float32, and the name of the
    candidate of each head."""

    matrix: torch.Tensor
    names: list[str]
    scores: torch.Tensor
    """On the held-out texts, `[texts, H]`."""
    record: dict[str, Any] = field(default_factory=dict)


class LayerSearch:
    """The search in one layer, at the recipe's clip ratios. What is tried comes in batches:
    rotations `[S, H, D, D]`, scores `[texts, S, H]`.

    `baseline` are the recipe's rotations, `judge` samples of held-out text, `rows` the keys and
    values `[H, N, D]` of the text that was fitted, from which a correction is learned; None learns
    nothing.
    """

    def __init__(
        self,
        layer: Layer,
        moments: dict[str, Moment],
        recipe: Recipe,
        baseline: LayerRotations,
        judge: list[QuerySample],
        rows: tuple[torch.Tensor, torch.Tensor] | None = None,
    ):
        assert recipe.search is not None
        self.layer, self.moments, self.recipe, self.settings = layer, moments, recipe, recipe.search
        self.baseline, self.rows = baseline, rows
        self.form = int2.FORMATS[self.settings.format]
        self.device = judge[0].key.device
        self.mean = {
            side: torch.zeros_like(moments[side].mean).float().to(self.device)
            for side in ("key", "value")
        }
        self.mean |= {side: moments[side].mean.float().to(self.device) for side in recipe.centered}
        self.judge = [self._centered(sample) for sample in judge] if recipe.center_keys else judge

    def _centered(self, sample: QuerySample) -> QuerySample:
        """With keys as a server reads all of them, exact or stored: without their mean."""
        return replace(sample, key=sample.key - self.mean["key"].to(sample.key.device)[:, None])

    def keys(self, deadline: float = math.inf) -> Side:
        baseline = self._baseline("key")
        with torch.no_grad():
            back = [
                sample.attention(self._back("key", sample.key, baseline.matrix[None]))[0]
                for sample in self.judge
            ]
            pairs = list(zip(self.judge, back, strict=True))
            divergence = self._average(
                [sample.divergence(attention) for sample, attention in pairs]
            )
            error = self._average([sample.key_error(attention) for sample, attention in pairs])

        def score(sample: QuerySample, rows: torch.Tensor) -> torch.Tensor:
            attention = sample.attention(rows)[0]
            by_divergence = sample.divergence(attention).to(self.device) / divergence
            by_error = sample.key_error(attention).to(self.device) / error
            return (by_divergence + by_error) / 2

        return self._choose(
            "key", baseline, self.moments["query"].second_moment.cpu(), score, deadline
        )

    def values(self, key: Side, deadline: float = math.inf) -> Side:
        """The same for values, as they are read by attention over the keys that were chosen."""
        baseline = self._baseline("value")
        with torch.no_grad():
            parts = {
                id(s): s.attention(self._back("key", s.key, key.matrix[None]))[1]
                for s in self.judge
            }
            back = [self._back("value", s.value, baseline.matrix[None]) for s in self.judge]
            error = self._average(
                [
                    s.value_error(parts[id(s)], rows)
                    for s, rows in zip(self.judge, back, strict=True)
                ]
            )

        def score(sample: QuerySample, rows: torch.Tensor) -> torch.Tensor:
            return sample.value_error(parts[id(sample)], rows).to(self.device) / error

        return self._choose("value", baseline, self._output_metric(), score, deadline)

    def _average(self, scores: Sequence[torch.Tensor]) -> torch.Tensor:
        """`[H]` of `[1, H]` each, of layers that may be on several devices."""
        return torch.cat([score.to(self.device) for score in scores]).mean(0)

    def _output_metric(self) -> torch.Tensor:
        """How errors of values count behind the output projection, `[H, D_v, D_v]` float64."""
        projection, heads = self.judge[0].projection, self.layer.kv_heads
        if projection is None:
            return compositions.identity(self.layer.value_dim).expand(heads, -1, -1)
        baseline = projection.cpu().double().unflatten(0, (heads, -1))
        return (baseline @ baseline.mT).sum(1)

    def _baseline(self, side: str) -> Side:
        """What the recipe makes without a search: the measure of all others."""
        matrix = self.baseline[side].matrix.to(self.device).expand(self.layer.kv_heads, -1, -1)
        return Side(matrix, ["own"] * self.layer.kv_heads, torch.empty(0))

    def _choose(
        self, side: str, baseline: Side, read: torch.Tensor, score: Score, deadline: float
    ) -> Side:
        mean = self.mean[side].cpu().double()
        stored = self.moments[side].second_moment.cpu() - mean.unsqueeze(-1) * mean.unsqueeze(-2)
        baseline.scores = self._scores(side, baseline.matrix[None], score)[:, 0]
        starts = self._closed_forms(side, closed_forms(stored, read), score)
        chosen = _better(baseline, starts[0])
        record: dict[str, Any] = {"closed": chosen.scores.mean(0).tolist()}
        if self.settings.steps and self.rows is not None:
            learned, curve = self._learn(
                side, read, starts[: self.settings.starts], score, deadline
            )
            for start in learned:
                chosen = _better(chosen, start)
            record |= {
                "after_learning": torch.stack([start.scores.mean(0) for start in learned]).tolist(),
                "curve": curve,
            }
        return replace(
            chosen,
            record=record | {"candidate": chosen.names, "chosen": chosen.scores.mean(0).tolist()},
        )

    def _closed_forms(self, side: str, found: dict[str, torch.Tensor], score: Score) -> list[Side]:
        """Each head's candidates, best first."""
        names, matrices = list(found), torch.stack(list(found.values())).float().to(self.device)
        scores = self._scores(side, matrices, score)
        sides = [
            Side(matrix, [name] * self.layer.kv_heads, its)
            for name, matrix, its in zip(names, matrices, scores.unbind(1), strict=True)
        ]
        return [_pick(sides, which.cpu()) for which in scores.mean(0).argsort(0)]

    def _learn(
        self, side: str, metric: torch.Tensor, starts: Sequence[Side], score: Score, deadline: float
    ) -> tuple[list[Side], list[list[float]]]:
        """Learned rotations from several starts at once, with the curve of their losses."""
        assert self.rows is not None
        matrix = torch.stack([start.matrix for start in starts])
        clip = self._clip(side, matrix).unsqueeze(-1)

        def codec(rotated: torch.Tensor) -> torch.Tensor:
            return straight_through(rotated, clip, self.recipe.group_size, self.form)

        rows = self.rows[0 if side == "key" else 1] - self.mean[side][:, None]
        settings, seed = self.settings, self.recipe.seed
        learned, curve = learn(
            rows, metric, matrix, codec, settings.steps, settings.rate, seed=seed, deadline=deadline
        )
        scores = self._scores(side, learned, score)
        found = [
            Side(one, [name + _LEARNED for name in start.names], its)
            for start, one, its in zip(starts, learned, scores.unbind(1), strict=True)
        ]
        return found, curve[:: max(1, len(curve) // 20)]

    def _back(self, side: str, rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        """Rows `[1, H, T, D]` as they come back from S caches. Those of keys are centred
        already."""
        clip, mean = self._clip(side, matrix), self.mean[side].to(rows.device)[:, None]
        if side == "key":
            return fake_quantize(rows, matrix, clip, self.recipe.group_size, self.form)
        return fake_quantize(rows - mean, matrix, clip, self.recipe.group_size, self.form) + mean

    def _clip(self, side: str, matrix: torch.Tensor) -> torch.Tensor:
        """The recipe's clip ratio of each of `[S, H]`."""
        ratio = self.recipe.key_clip if side == "key" else self.recipe.value_clip
        return torch.full(matrix.shape[:2], ratio, dtype=torch.float64)

    @torch.no_grad()
    def _scores(self, side: str, matrix: torch.Tensor, score: Score) -> torch.Tensor:
        """On the held-out texts, `[texts, S, H]`: of layers that share a cache the mean, since they
        read the same texts."""
        by_text: dict[int, list[torch.Tensor]] = {}
        for s in self.judge:
            rows = s.key if side == "key" else s.value
            scores = [score(s, self._back(side, rows, one)) for one in matrix.split(BATCH)]
            by_text.setdefault(s.text, []).append(torch.cat(scores))
        return torch.stack([torch.stack(readers).mean(0) for readers in by_text.values()])


def _better(artifact: Side, candidate: Side) -> Side:
    """The candidate in the heads where it is clearly better."""
    return _pick(
        [artifact, candidate], clearly_less(candidate.scores, artifact.scores).long().cpu()
    )


def _pick(found: Sequence[Side], which: torch.Tensor) -> Side:
    """Head by head, the one of number `which` `[H]`."""
    heads = torch.arange(len(which))
    return Side(
        torch.stack([side.matrix for side in found])[which, heads],
        [found[i].names[head] for head, i in enumerate(which.tolist())],
        torch.stack([side.scores for side in found])[which, :, heads].T,
    )
