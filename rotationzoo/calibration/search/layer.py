"""Chooses the rotations of one layer, head by head, on calibration text that the statistics have
not seen.

Keys are scored by the KL divergence of their attention and by how much they change the block's
output; values by the latter alone. Scores are relative to the recipe's own rotation, which scores
1. They cost one layer's attention, not a run of the model: whether the model takes what they choose
is decided by its answers (`contest`).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from rotationzoo.calibration.search.choice import BASELINE, Choice, choose_better, pick_by_head
from rotationzoo.calibration.search.closed_forms import closed_forms
from rotationzoo.calibration.search.layer_codec import LayerCodec
from rotationzoo.calibration.search.learn import LearningSettings, learn_rotations
from rotationzoo.calibration.search.query_samples import QuerySample
from rotationzoo.linalg import compositions
from rotationzoo.linalg.moments import Moment
from rotationzoo.model.geometry import Layer
from rotationzoo.recipe import Recipe
from rotationzoo.rotations import LayerRotations

BATCH = 8  # rotations scored at once
_LEARNED = ", learned"  # appended to the name of the candidate that learning started from
_CURVE_POINTS = 20  # about how many points of a loss curve the manifest records

Score = Callable[[int, torch.Tensor], torch.Tensor]
"""A function from the number of a sample, and its keys or values `[S, H, T, D]` as S caches return
them, to scores `[S, H]`; lower is better."""


class LayerSearch:
    """The search in one layer, at the recipe's clip ratios.

    - `layer`, `moments`: the layer and its statistics.
    - `recipe`, `baseline`: the recipe, and the rotations that it makes without a search.
    - `samples`: query samples of held-out text, on which every choice is made.
    - `rows`: keys and values `[H, N, D]` of the fitted text, to learn from; with None nothing is
      learned.
    """

    def __init__(
        self,
        layer: Layer,
        moments: Mapping[str, Moment],
        recipe: Recipe,
        baseline: LayerRotations,
        samples: list[QuerySample],
        rows: tuple[torch.Tensor, torch.Tensor] | None = None,
    ):
        assert recipe.search is not None
        self.layer, self.moments, self.settings = layer, moments, recipe.search
        self.seed, self.baseline, self.rows = recipe.seed, baseline, rows
        self.device = samples[0].key.device
        self.codec = LayerCodec.from_recipe(recipe, moments, self.device)
        if recipe.center_keys:
            samples = [self.codec.center_keys(sample) for sample in samples]
        self.samples = samples

    def choose_keys(self, deadline: float = math.inf) -> Choice:
        """Choose the rotations of keys. Learning ends at `deadline` (`time.monotonic()`)."""
        baseline = self._baseline("key")
        with torch.no_grad():
            attentions = [attention for attention, _ in self._attend(baseline)]
            pairs = list(zip(self.samples, attentions, strict=True))
            divergence = self._mean([sample.divergence(weights) for sample, weights in pairs])
            error = self._mean([sample.key_error(weights) for sample, weights in pairs])

        def score(number: int, restored: torch.Tensor) -> torch.Tensor:
            sample = self.samples[number]
            attention, _ = sample.attention(restored)
            by_divergence = sample.divergence(attention).to(self.device) / divergence
            by_error = sample.key_error(attention).to(self.device) / error
            return (by_divergence + by_error) / 2

        metric = self.moments["query"].second_moment.cpu()
        return self._choose("key", baseline, metric, score, deadline)

    def choose_values(self, key: Choice, deadline: float = math.inf) -> Choice:
        """Choose the rotations of values, given attention over the chosen keys. Learning ends at
        `deadline` (`time.monotonic()`)."""
        baseline = self._baseline("value")
        with torch.no_grad():
            quantized_parts = [part for _, part in self._attend(key)]
            errors = []
            for sample, part in zip(self.samples, quantized_parts, strict=True):
                restored = self.codec.restore("value", sample.value, baseline.matrix[None])
                errors.append(sample.value_error(part, restored))
            error = self._mean(errors)

        def score(number: int, restored: torch.Tensor) -> torch.Tensor:
            part = quantized_parts[number]
            return self.samples[number].value_error(part, restored).to(self.device) / error

        return self._choose("value", baseline, self._output_metric(), score, deadline)

    def _attend(self, key: Choice) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield, sample by sample, the attention over rotated keys and the part of it on quantized
        ones.

        A generator, so that a caller that keeps only one of the two needs half the memory.
        """
        for sample in self.samples:
            restored = self.codec.restore("key", sample.key, key.matrix[None])
            yield sample.attention(restored)

    def _mean(self, scores: Sequence[torch.Tensor]) -> torch.Tensor:
        """The mean `[H]` of one score `[1, H]` per sample. Layers that share a cache may be on
        several devices, so scores are moved to one."""
        return torch.cat([score.to(self.device) for score in scores]).mean(0)

    def _output_metric(self) -> torch.Tensor:
        """The metric `[H, D_v, D_v]`, float64, in which errors of values count after the output
        projection."""
        projection, heads = self.samples[0].projection, self.layer.kv_heads
        if projection is None:
            return compositions.identity(self.layer.value_dim).expand(heads, -1, -1)
        by_group = torch.unflatten(projection.cpu().double(), 0, (heads, -1))
        return (by_group @ by_group.mT).sum(1)

    def _baseline(self, side: str) -> Choice:
        """The recipe's own rotations, against which all candidates are measured."""
        heads = self.layer.kv_heads
        matrix = self.baseline[side].matrix.to(self.device).expand(heads, -1, -1)
        return Choice(matrix, [BASELINE] * heads, torch.empty(0))

    def _choose(
        self, side: str, baseline: Choice, metric: torch.Tensor, score: Score, deadline: float
    ) -> Choice:
        """Choose among the baseline, the closed forms and what is learned from them.

        `metric` `[H, D, D]` says how errors of rows count.
        """
        mean = self.codec.means[side].cpu().double()
        second_moment = self.moments[side].second_moment.cpu()
        covariance = second_moment - mean.unsqueeze(-1) * mean.unsqueeze(-2)
        baseline.scores = self._score_all(side, baseline.matrix[None], score)[:, 0]
        ranked = self._rank(side, closed_forms(covariance, metric), score)
        chosen = choose_better(baseline, ranked[0])
        record: dict[str, Any] = {"closed": chosen.scores.mean(0).tolist()}
        if self.settings.steps and self.rows is not None:
            starts = ranked[: self.settings.starts]
            learned, curve = self._learn(side, metric, starts, score, deadline)
            # Candidates are tried one by one, each against the best so far, so one that learned
            # little loses.
            for candidate in learned:
                chosen = choose_better(chosen, candidate)
            means = torch.stack([candidate.scores.mean(0) for candidate in learned])
            record |= {"after_learning": means.tolist(), "curve": curve}
        record |= {"candidate": chosen.names, "chosen": chosen.scores.mean(0).tolist()}
        return replace(chosen, record=record)

    def _rank(
        self, side: str, candidates: Mapping[str, torch.Tensor], score: Score
    ) -> list[Choice]:
        """Rank the candidates of each head, best first."""
        matrices = torch.stack(list(candidates.values())).float().to(self.device)
        scores = self._score_all(side, matrices, score)
        choices = [
            Choice(matrix, [name] * self.layer.kv_heads, by_text)
            for name, matrix, by_text in zip(candidates, matrices, scores.unbind(1), strict=True)
        ]
        return [pick_by_head(choices, which.cpu()) for which in scores.mean(0).argsort(0)]

    def _learn(
        self,
        side: str,
        metric: torch.Tensor,
        starts: Sequence[Choice],
        score: Score,
        deadline: float,
    ) -> tuple[list[Choice], list[list[float]]]:
        """Learn rotations from several starts at once; also return the curve of their losses."""
        assert self.rows is not None
        matrix = torch.stack([start.matrix for start in starts])
        rows = self.rows[0 if side == "key" else 1] - self.codec.means[side][:, None]
        settings = LearningSettings(
            self.settings.steps, self.settings.rate, seed=self.seed, deadline=deadline
        )
        codec = self.codec.learnable(side, matrix)
        learned, curve = learn_rotations(rows, metric, matrix, codec, settings)
        scores = self._score_all(side, learned, score).unbind(1)
        choices = []
        for start, rotation, by_text in zip(starts, learned, scores, strict=True):
            names = [name + _LEARNED for name in start.names]
            choices.append(Choice(rotation, names, by_text))
        return choices, curve[:: max(1, len(curve) // _CURVE_POINTS)]

    @torch.no_grad()
    def _score_all(self, side: str, matrix: torch.Tensor, score: Score) -> torch.Tensor:
        """Scores of rotations `[S, H, D, D]` on the held-out texts, `[texts, S, H]`.

        Layers that share a cache read the same texts, so their scores are averaged per text: they
        are not independent evidence.
        """
        by_text: dict[int, list[torch.Tensor]] = {}
        for number, sample in enumerate(self.samples):
            rows = sample.key if side == "key" else sample.value
            scores = [
                score(number, self.codec.restore(side, rows, batch))
                for batch in torch.split(matrix, BATCH)
            ]
            by_text.setdefault(sample.text, []).append(torch.cat(scores))
        return torch.stack([torch.stack(readers).mean(0) for readers in by_text.values()])
