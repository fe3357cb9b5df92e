"""Choosing rotations and clip ratios in one layer, head by head, on calibration text that the statistics have not seen.

Keys are scored by the KL of their attention and by what they change in the block's output, values by the latter, each
relative to the recipe's own rotation: 1 is as good as that. `docs/quality.md` shows that both predict what the model loses.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rotationzoo import int2, rotation
from rotationzoo.candidates import candidates
from rotationzoo.geometry import Layer
from rotationzoo.moments import Moment
from rotationzoo.recipe import Recipe
from rotationzoo.refine import learn, straight_through
from rotationzoo.sample import Sample
from rotationzoo.simulate import stored
from rotationzoo.trim import clearly_less

RATIOS = (1.0, 0.98, 0.96, 0.94, 0.92, 0.9, 0.88, 0.85, 0.82, 0.78, 0.74, 0.7, 0.6, 0.5)
_SCREEN_RATIOS, _SCREEN_TEXTS, _FINALISTS = (0.96, 0.9, 0.84, 0.75, 0.6), 2, 4
_LEARNED = ", learned"
_BATCH = 8  # rotations tried at once

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


class Chooser:
    """The search in one layer. What is tried comes in batches: rotations `[S, H, D, D]`, clip ratios `[S, H]`, scores
    `[texts, S, H]`.

    `judge` are samples of held-out text; `rows` the keys and values `[H, N, D]` of the text that was fitted, from which a
    correction is learned; None learns nothing.
    """

    def __init__(
        self,
        layer: Layer,
        moments: dict[str, Moment],
        recipe: Recipe,
        judge: list[Sample],
        rows: tuple[torch.Tensor, torch.Tensor] | None = None,
    ):
        assert recipe.search is not None
        self.layer, self.moments, self.recipe, self.settings = layer, moments, recipe, recipe.search
        self.judge, self.rows = judge, rows
        self.form = int2.FORMATS[self.settings.format]
        self.device = judge[0].key.device
        self.heads = torch.arange(layer.kv_heads)

    def keys(self, deadline: float | None = None) -> Side:
        mean = self.moments["key"].mean.cpu()
        stored, read = (self.moments[kind].second_moment.cpu() for kind in ("key", "query"))
        if self.recipe.center_keys:
            stored = stored - mean.unsqueeze(-1) * mean.unsqueeze(-2)
        else:
            mean = torch.zeros_like(mean)
        own = self._own("key", mean)
        with torch.no_grad():
            back = {id(s): s.attention(self._back(s.key, own.matrix[None], own.mean, own.clip[None]))[0] for s in self.judge}
            divergence = torch.cat([s.divergence(back[id(s)]) for s in self.judge]).mean(0)
            error = torch.cat([s.key_error(back[id(s)]) for s in self.judge]).mean(0)

        def score(sample: Sample, rows: torch.Tensor) -> torch.Tensor:
            attention = sample.attention(rows)[0]
            return (sample.divergence(attention) / divergence + sample.key_error(attention) / error) / 2

        return self._choose("key", own, stored, read, score, deadline)

    def values(self, key: Side, deadline: float | None = None) -> Side:
        """The same for values, as they are read by attention over the keys that were chosen."""
        own = self._own("value", torch.zeros_like(self.moments["value"].mean).cpu())
        with torch.no_grad():
            parts = {id(s): s.attention(self._back(s.key, key.matrix[None], key.mean, key.clip[None]))[1] for s in self.judge}
            back = [self._back(s.value, own.matrix[None], own.mean, own.clip[None]) for s in self.judge]
            error = torch.cat([s.value_error(parts[id(s)], rows) for s, rows in zip(self.judge, back, strict=True)]).mean(0)

        def score(sample: Sample, rows: torch.Tensor) -> torch.Tensor:
            return sample.value_error(parts[id(sample)], rows) / error

        return self._choose("value", own, self.moments["value"].second_moment.cpu(), self._output_metric(), score, deadline)

    def _output_metric(self) -> torch.Tensor:
        """How errors of values count behind the output projection, `[H, D_v, D_v]` float64."""
        projection, heads = self.judge[0].projection, len(self.heads)
        if projection is None:
            return rotation.identity(self.layer.value_dim).expand(heads, -1, -1)
        own = projection.cpu().double().unflatten(0, (heads, -1))
        return (own @ own.mT).sum(1)

    def _own(self, side: str, mean: torch.Tensor) -> Side:
        """What the recipe makes without a search: the measure of all others."""
        recipe = self.recipe
        kind, ratio = (recipe.key_statistic, recipe.key_clip) if side == "key" else (recipe.value_statistic, recipe.value_clip)
        basis = rotation.eigenbasis(self.moments[kind].second_moment)[1]
        matrix = rotation.compose(basis, recipe.composition, recipe.group(basis.shape[-1])).float().to(self.device)
        clip = torch.full((len(self.heads),), ratio, dtype=torch.float64)
        return Side(matrix, mean.float().to(self.device), clip, ["own"] * len(self.heads), torch.empty(0))

    def _choose(
        self, side: str, own: Side, stored: torch.Tensor, read: torch.Tensor, score: Score, deadline: float | None
    ) -> Side:
        own.scores = self._scores(side, own.matrix[None], own.mean, own.clip[None], score)[:, 0]
        starts = self._closed_forms(side, candidates(stored, read), own.mean, score)
        chosen = _better(own, starts[0])
        record: dict[str, Any] = {"closed": chosen.scores.mean(0).tolist()}
        if self.settings.steps and self.rows is not None:
            learned, curve = self._learn(side, read, starts[: self.settings.starts], score, deadline)
            for start in learned:
                chosen = _better(chosen, start)
            record |= {
                "after_learning": torch.stack([start.scores.mean(0) for start in learned]).tolist(),
                "curve": curve,
            }
        record |= {"candidate": chosen.names, "clip": chosen.clip.tolist(), "chosen": chosen.scores.mean(0).tolist()}
        return replace(chosen, record=record)

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
        self, side: str, metric: torch.Tensor, starts: Sequence[Side], score: Score, deadline: float | None
    ) -> tuple[list[Side], list[list[float]]]:
        """Learned rotations from several starts at once, with the curve of their losses."""
        assert self.rows is not None
        mean, clip = starts[0].mean, torch.stack([start.clip for start in starts])

        def back(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
            return self._back(rows, matrix, mean, clip)

        rows = self.rows[0 if side == "key" else 1]
        matrix = torch.stack([start.matrix for start in starts])
        learned, curve = learn(rows, metric, matrix, back, self.settings.steps, self.settings.rate, deadline=deadline)
        scores = self._scores(side, learned, mean, clip, score)
        found = []
        for start, one, its in zip(starts, learned, scores.unbind(1), strict=True):
            names = [name + _LEARNED for name in start.names]
            found.append(self._fine(side, replace(start, matrix=one, scores=its, names=names), score))
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
    return _pick([there, candidate], clearly_less(candidate.scores, there.scores).long().cpu())


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
