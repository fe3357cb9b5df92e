"""Models whose layers have states of linear attention, Mamba or convolutions beside keys and values,
or in the same layer."""

import pytest
from support.hybrids import CACHED, calibrate_hybrid
from support.vllm import server_settings

from rotationzoo import RotatedCache
from rotationzoo.api import evaluate
from rotationzoo.cache.layer import RotatedLayer
from rotationzoo.capacity.shape import read_shape
from rotationzoo.geometry import full_attention_layers
from rotationzoo.model.source import find


@pytest.mark.parametrize("name", CACHED)
def test_all_agree_on_the_layers_that_hold_keys_and_values(name, tmp_path):
    model, folder, artifact = calibrate_hybrid(name, tmp_path)
    options = {"tokens": 256, "length": 256, "windows": (16, 32), "tasks": [], "queries": 0}
    report = evaluate(str(folder), artifact, engine="vllm", device="cpu", **options)
    cache, settings = RotatedCache(artifact, model, engine="vllm"), server_settings(folder, artifact.folder)
    planned = read_shape(find(str(folder)))
    found = {
        "calibrate": [*artifact.rotations],
        "evaluate": report["layers"],
        "RotatedCache": [at for at, each in enumerate(cache.layers) if isinstance(each, RotatedLayer)],
        "plan": [each.layer.index for each in planned.layers],
        "serve": [*settings.codec.rotations],
    }
    assert found == dict.fromkeys(found, CACHED[name])
    assert full_attention_layers(model.config) is None, "serve leaves none of them exact"
    assert planned.state_bytes > 0
    assert not planned.uncounted_states
