"""Another engine's cache in the simulation: every token is read as the engine stores it."""

import pytest
import torch
from support import architectures
from support.float64 import CLOSE

from rotationzoo.cache.engine_arm import EngineArm
from rotationzoo.cache.simulated import Simulation
from rotationzoo.cache.size import arm_bits
from rotationzoo.cache.windows import Cache
from rotationzoo.codec.engine_caches import ENGINE_CACHES
from rotationzoo.model.capture import intercept
from rotationzoo.model.geometry import geometry_of

IDS = torch.randint(3, 59, (2, 24), generator=torch.Generator().manual_seed(1))
NO_WINDOWS = Cache(sink=0, recent=0)


@pytest.mark.parametrize("name", ["fp8", "int4_per_token_head", "turboquant_3bit_nc"])
def test_every_query_reads_all_tokens_quantized_its_own_too(name):
    model = architectures.build("qwen3", torch.float64)
    geometry = geometry_of(model)
    storage = ENGINE_CACHES[name]

    def read(layer, query, key, value, attend):
        rows = storage.key.read(key.float()), storage.value.read(value.float())
        return attend(query, *[each.to(query.dtype) for each in rows])

    with torch.no_grad():
        plain = model(input_ids=IDS, use_cache=False).logits
        with intercept(model, read):
            expected = model(input_ids=IDS, use_cache=False).logits
        simulation = Simulation(EngineArm(name, storage), NO_WINDOWS, geometry, {0, 1, 2, 3})
        with simulation.running(model):
            simulated = model(input_ids=IDS, use_cache=False).logits
    assert (simulated - expected).abs().max() <= CLOSE * plain.abs().max()
    assert (simulated - plain).abs().max() > 1e-3 * plain.abs().max()
    dim = geometry[0].key_dim
    bits = [storage.side(side).bits_per_element(dim) for side in ("key", "value")]
    assert arm_bits(geometry, EngineArm(name, storage), NO_WINDOWS, 100) == pytest.approx(
        sum(bits) / 2
    )
