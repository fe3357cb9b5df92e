"""Models whose layers have states of linear attention, Mamba or convolutions beside keys and
values, or in the same layer."""

import pytest
from support.cases import quick_first
from support.hybrids import CACHED, calibrate_hybrid
from support.vllm import server_settings

from rotationzoo import RotatedCache
from rotationzoo.api import evaluate
from rotationzoo.cache.layer import RotatedLayer
from rotationzoo.capacity.shape import read_shape
from rotationzoo.geometry import full_attention_layers
from rotationzoo.model.source import find
from rotationzoo.vllm.settings import cell_bytes


@pytest.mark.parametrize("name", quick_first(CACHED, 2))
def test_all_agree_on_the_layers_that_hold_keys_and_values(name, tmp_path):
    model, folder, artifact = calibrate_hybrid(name, tmp_path)
    options = {"tokens": 64, "length": 64, "windows": (4, 16), "tasks": [], "baselines": ()}
    report = evaluate(str(folder), artifact, engine="vllm", device="cpu", **options)
    cache, served = RotatedCache(artifact, model, engine="vllm"), find(str(folder))
    kept = [at for at, each in enumerate(cache.layers) if isinstance(each, RotatedLayer)]
    planned = read_shape(served)
    found = {
        "calibrate": [*artifact.rotations],
        "evaluate": report["layers"],
        "RotatedCache": kept,
        "plan": [each.index for each in planned.layers],
        "serve": [*server_settings(folder, artifact.folder).codec.rotations],
    }
    assert found == dict.fromkeys(found, CACHED[name])
    assert full_attention_layers(model.config) is None, "serve leaves none of them exact"
    assert planned.state_bytes > 0
    assert not planned.uncounted_states


def test_a_budget_gives_layers_beside_states_the_same_bits(tmp_path):
    """Blocks of all layers take the same bytes."""
    model, folder, artifact = calibrate_hybrid("falcon_h1", tmp_path, bits=3.5)
    apart = {sides["key"].widths.sum().item() for sides in artifact.rotations.values()}
    assert len(apart) > 1, "the budget itself gives layers different bits"
    settings = server_settings(folder, artifact.folder)
    cache = RotatedCache(artifact, model, engine="vllm")
    for served in (settings, cache.settings):
        found = {cell_bytes(served, 32, layer) for layer in served.codec.rotations}
        assert found == {28}, "and 24 without a budget"
