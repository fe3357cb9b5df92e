"""The choice of rotations in one layer, head by head: closed forms are ranked, and what was learned
from the best of them is compared with them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rotationzoo.calibration.search.choice import BASELINE, Choice, choose_better, pick_by_head
from rotationzoo.calibration.search.closed_forms import closed_forms
from rotationzoo.calibration.search.frame import LayerData
from rotationzoo.calibration.search.layer_codec import LayerCodec
from rotationzoo.calibration.search.learn import StoredRows
from rotationzoo.calibration.search.query_samples import QuerySample
from rotationzoo.calibration.search.scoring import Scorer
from rotationzoo.linalg import compositions
from rotationzoo.model.geometry import Layer
from rotationzoo.recipe import Recipe
from rotationzoo.rotations import LayerRotations

_LEARNED = ", learned"  # appended to the name of the candidate that learning started from
_CURVE_POINTS = 20  # about how many points of a loss curve the manifest records


Forms = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""The metric `[H, D, D]`, float64, in which errors of rows count, and closed forms by name."""


@dataclass(frozen=True)
class Ranking:
    """The closed forms of one side of a layer, with their scores."""

    chosen: Choice
    """The best for each head, where it is clearly better than the recipe's own rotation."""
    starts: Sequence[Choice]
    """The best few of each head, best first, for learning to start from."""
    metric: torch.Tensor
    """The metric `[H, D, D]`, float64, in which errors of rows count."""
    norms: torch.Tensor
    """What scores are relative to."""


class LayerSearch:
    """The search in one layer, at the recipe's clip ratios.

    - `layer`, `data`: the layer, and what is known of it.
    - `recipe`, `baseline`: the recipe, and the rotations that it makes without a search.

    A side is ranked, then learned from its starts, together with other layers, and then settled.
    Samples are loaded for each of these steps, so that many layers can be searched side by side.
    """

    def __init__(self, layer: Layer, data: LayerData, recipe: Recipe, baseline: LayerRotations):
        assert recipe.search is not None
        self.layer, self.data, self.baseline = layer, data, baseline
        self.settings, self._centered = recipe.search, recipe.center_keys
        self.codec = LayerCodec.from_recipe(recipe, data.moments, data.device)

    def make_forms(self, side: str) -> Forms:
        """The closed forms of a side, and the metric that they are made with."""
        metric = self._metric(side)
        mean = self.codec.means[side].cpu().double()
        second_moment = self.data.moments[side].second_moment.cpu()
        covariance = second_moment - mean.unsqueeze(-1) * mean.unsqueeze(-2)
        return metric, closed_forms(covariance, metric.cpu())

    def rank(self, side: str, forms: Forms, keys: Choice | None = None) -> Ranking:
        """Score the closed forms of a side; those of values with the `keys` that were chosen."""
        metric, candidates = forms
        samples = self._load_samples()
        scorer = Scorer(side, samples, self.codec, None if keys is None else keys.matrix)
        baseline = self._baseline(side)
        norms = scorer.find_norms(baseline.matrix)
        baseline.scores = scorer.score(baseline.matrix[None], norms)[:, 0]
        matrices = torch.stack(list(candidates.values())).float().to(self.data.device)
        choices = self._choices(list(candidates), matrices, scorer.score(matrices, norms))
        order = torch.stack([choice.scores.mean(0) for choice in choices]).argsort(0)
        ranked = [pick_by_head(choices, which.cpu()) for which in order]
        chosen = choose_better(baseline, ranked[0])
        return Ranking(chosen, ranked[: self.settings.starts], metric, norms)

    def rows(self, side: str) -> StoredRows | None:
        """The keys or values to learn from; None if there are none."""
        if self.data.stored.rows is None:
            return None
        keys, values = self.data.stored.rows
        rows = (keys if side == "key" else values).to(self.data.device)
        equalizer = None
        if self.data.equalizers is not None:
            equalizer = self.data.equalizers[side].to(self.data.device)
        return StoredRows(rows, self.codec.means[side], equalizer)

    def settle(
        self,
        side: str,
        ranking: Ranking,
        learned: tuple[torch.Tensor, torch.Tensor] | None,
        keys: Choice | None = None,
    ) -> Choice:
        """Choose among the closed forms and what was `learned` from the starts: the rotations
        `[S, H, D, D]` and the losses `[steps, S, H]`."""
        chosen = ranking.chosen
        record: dict[str, Any] = {"closed": chosen.scores.mean(0).tolist()}
        if learned is not None:
            matrices, losses = learned
            samples = self._load_samples()
            scorer = Scorer(side, samples, self.codec, None if keys is None else keys.matrix)
            scores = scorer.score(matrices, ranking.norms)
            candidates = []
            for number, start in enumerate(ranking.starts):
                names = [name + _LEARNED for name in start.names]
                candidates.append(Choice(matrices[number], names, scores[:, number]))
            # Candidates are tried one by one, each against the best so far, so one that learned
            # little loses.
            for candidate in candidates:
                chosen = choose_better(chosen, candidate)
            means = torch.stack([candidate.scores.mean(0) for candidate in candidates])
            curve = losses.sum(-1).tolist()
            curve = curve[:: max(1, len(curve) // _CURVE_POINTS)]
            record |= {"after_learning": means.tolist(), "curve": curve}
        record |= {"candidate": chosen.names, "chosen": chosen.scores.mean(0).tolist()}
        return replace(chosen, record=record)

    def _load_samples(self) -> list[QuerySample]:
        samples = self.data.load_samples()
        if self._centered:
            samples = [self.codec.center_keys(sample) for sample in samples]
        return samples

    def _metric(self, side: str) -> torch.Tensor:
        """The metric `[H, D, D]`, float64, in which errors of a side's rows count: how queries read
        keys, and how the output projection reads values."""
        if side == "key":
            return self.data.moments["query"].second_moment
        reader, heads = self.data.stored.queries[0].layer, self.layer.kv_heads
        projection = self.data.projections.get(reader)
        if projection is None:
            return compositions.identity(self.layer.value_dim).expand(heads, -1, -1)
        # One KV head at a time, because float64 copies of whole weights are large.
        groups = torch.unflatten(projection, 0, (heads, -1)).unbind()
        return torch.stack([_sum_of_squares(group.double()) for group in groups])

    def _baseline(self, side: str) -> Choice:
        """The recipe's own rotations, against which all candidates are measured."""
        heads = self.layer.kv_heads
        matrix = self.baseline[side].matrix.to(self.data.device).expand(heads, -1, -1)
        return Choice(matrix, [BASELINE] * heads, torch.empty(0))

    def _choices(
        self, names: Sequence[str], matrices: torch.Tensor, scores: torch.Tensor
    ) -> list[Choice]:
        """The candidates `[S, H, D, D]` with their scores `[texts, S, H]`."""
        by_candidate = zip(names, matrices, scores.unbind(1), strict=True)
        heads = self.layer.kv_heads
        return [Choice(matrix, [name] * heads, by_text) for name, matrix, by_text in by_candidate]


def _sum_of_squares(group: torch.Tensor) -> torch.Tensor:
    """`sum_g W_g W_g^T` `[D, D]` of a group's projections `[G, D, hidden]`."""
    return (group @ group.mT).sum(0)
