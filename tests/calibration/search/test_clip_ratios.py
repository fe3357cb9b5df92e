"""The clip ratios of a model, and what it loses by them."""

import math

import pytest
import torch
from support.searches import CACHE, ROWS

from rotationzoo.artifact.layout import rotation_tensors
from rotationzoo.cache.arm import Arm
from rotationzoo.cache.simulated import Simulation
from rotationzoo.cache.windows import Cache
from rotationzoo.calibration.fit import fit
from rotationzoo.calibration.search import criterion
from rotationzoo.calibration.search.candidate import Candidate
from rotationzoo.calibration.search.clip_ratios import search_clip
from rotationzoo.calibration.search.criterion import Criterion
from rotationzoo.calibration.search.model_divergence import ModelDivergence
from rotationzoo.calibration.search.run import search_rotations
from rotationzoo.codec import int2
from rotationzoo.model.geometry import Layer
from rotationzoo.recipe import PRESETS


def test_nothing_better_keeps_what_the_recipe_says(task, monkeypatch):
    monkeypatch.setattr(
        criterion,
        "clearly_less",
        lambda after, before: torch.zeros(after.shape[1:], dtype=torch.bool),
    )
    result = search_rotations(task)
    rotations, record = result.rotations, result.record
    assert record["model"]["kept"] == "own"
    baseline = rotation_tensors(task.baseline)
    for name, tensor in rotation_tensors(rotations).items():
        assert name.endswith(".clip") or torch.equal(tensor, baseline[name])


@pytest.mark.parametrize("format", int2.FORMATS)
@pytest.mark.parametrize("dim", [16, 32, 40, 48, 64])
def test_every_clip_ratio_that_is_tried_clamps_at_another_entry(dim, format):
    """Of 16 sorted magnitudes .90 and .92 take the same, and scores that tie would end the search:
    here the best is far off."""
    geometry = [Layer(0, 0, 2, 1, dim, dim)]
    recipe = PRESETS["hadamard"].model_copy(update={"key_clip": 0.9, "value_clip": 0.9})
    candidate = Candidate("hadamard", recipe, fit(None, recipe, geometry))
    rows = torch.randn(1, 1, 64, dim, generator=torch.Generator().manual_seed(0))
    cache = Cache(int2.FORMATS[format], sink=2, recent=4)

    class ThresholdLoss(ModelDivergence):
        """Less the lower the threshold, down to a third: what another threshold does not change
        scores the same. It rises half as fast beyond, so that no two on either side tie."""

        def measure(self, candidates, tell):
            best = self._threshold(0.33)
            ratios = [candidate[0].key.clip.item() for candidate in candidates]
            above = torch.stack([self._threshold(ratio) - best for ratio in ratios]).double()
            return torch.maximum(above, -above / 2)[:, None]

        def _threshold(self, ratio):
            return int2.clip_threshold(rows, ratio, cache.format.interpolated).mean()

    loss = ThresholdLoss(None, geometry, cache, None, ROWS)
    found, tried = search_clip(Criterion(None, loss), candidate)
    ratios = sorted(tried["key"])
    assert all(ratio == round(ratio, 2) for ratio in ratios), "tidy"
    assert abs(found.clips["key"] - 0.33) < 1 / dim + 0.02
    scores = [score.divergence.item() for score in tried["key"].values()]
    assert len(set(scores)) == len(scores), "no two that store the same"


def test_the_models_own_loss_is_that_of_reading_the_cache(task):
    """Windows that keep everything exact cost nothing; and the divergence is that of the two
    predictions."""
    model, geometry, baseline = task.model, task.geometry, task.baseline
    with_short_text = ModelDivergence(model, geometry, CACHE, None, [ROWS[0][:6], *ROWS[4:]])
    assert with_short_text.measure([baseline]).shape == (1, 2)
    measured = ModelDivergence(model, geometry, CACHE, None, ROWS[4:]).measure([baseline] * 2)
    assert torch.equal(measured[0], measured[1])
    arm = Arm("own", baseline)
    ids, layers = ROWS[4][None], {layer.index for layer in geometry}
    with torch.no_grad():
        exact = model(input_ids=ids).logits[0, 6:].double().log_softmax(-1)
        with Simulation(arm, CACHE, geometry, layers).running(model):
            simulated = model(input_ids=ids).logits[0, 6:].double().log_softmax(-1)
    expected = (exact.exp() * (exact - simulated)).sum(-1).mean()
    assert math.isclose(measured[0, 0].item(), expected.item(), rel_tol=1e-4)
