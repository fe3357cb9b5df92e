"""What each layer loses: the same whether the layers before it run or return what they returned."""

import pytest
import torch
from support.architectures import CALIBRATED, LAYERS, build, families

from rotationzoo.calibration import sensitivity
from rotationzoo.calibration.collect import collect
from rotationzoo.calibration.fit import fit
from rotationzoo.model.geometry import geometry_of
from rotationzoo.progress import silent
from rotationzoo.recipe import Recipe

RECIPE = Recipe(feedback=True, sink=4, recent=4)
ROWS = [torch.arange(48) % 59, torch.arange(40) % 7]


def losses(model):
    """The sensitivities of all layers and sides, in order."""
    geometry = geometry_of(model, ROWS[0][None])
    rotations = fit(collect(model, geometry, [ROWS[0][None]], RECIPE), RECIPE, geometry)
    measured = sensitivity.measure_sensitivities(model, geometry, rotations, ROWS, RECIPE, silent)
    return [rotation.sensitivity.item() for _, _, rotation in measured.each()]


@families(CALIBRATED)
def test_leaving_out_layers_changes_no_loss(name, monkeypatch):
    model = build(name)
    measured = losses(model)
    assert max(measured) > 0
    monkeypatch.setattr(sensitivity, "decoder_layers", lambda model: [])
    # Measured: equal, for every family.
    assert losses(model) == pytest.approx(measured, rel=1e-6, abs=1e-12)


def test_layers_before_the_measured_one_do_not_run(monkeypatch):
    model, calls = build("llama"), []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    losses(model)
    everything, calls[:] = len(calls), []
    monkeypatch.setattr(sensitivity, "decoder_layers", lambda model: [])
    losses(model)
    # Of 4 layers, a row runs 4, 3, 2 and 1 in place of 4 each time, for keys and for values.
    assert len(calls) - everything == len(ROWS) * 2 * (LAYERS**2 - (4 + 3 + 2 + 1))
