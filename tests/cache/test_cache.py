"""The 2-bit cache in every family of models against its simulation, and what it holds of
latents."""

from dataclasses import replace

import pytest
import torch
from support import architectures
from support.architectures import CALIBRATED, SPARSE, families
from support.caches import (
    cache_for,
    distance,
    random_arm,
    read_in_calls,
    read_whole,
    simulate,
    with_means,
    with_transforms,
)
from support.cases import quick_first
from support.float64 import CLOSE
from transformers import DynamicCache

from rotationzoo.cache.rotated import RotatedCache
from rotationzoo.codec.formats import SEGMENTS
from rotationzoo.codec.rotated import RotatedCodec
from rotationzoo.codec.windows import CacheLayout
from rotationzoo.errors import RotationZooError, UnsupportedModel

IDS = torch.randint(3, 59, (2, 24), generator=torch.Generator().manual_seed(1))
# New tokens of a call, and windows that are smaller than the sliding windows of these models.
LAYOUTS = {
    "token by token": (1, CacheLayout(sink=2, recent=5)),
    "chunks": (7, CacheLayout(sink=3, recent=4, prefill_chunk=7)),
    "window": (7, CacheLayout(sink=3, recent=4, prefill_chunk=7, prefill_layout="window")),
}


@pytest.mark.parametrize("layout", quick_first(LAYOUTS, 2))
@families([name for name in CALIBRATED if name not in {"minimax", *SPARSE}])
def test_it_is_read_as_the_simulation_says(name, layout):
    step, windows = LAYOUTS[layout]
    model = architectures.build(name, torch.float64)
    arm = random_arm(model)
    simulated, exact = simulate(model, arm, windows, IDS), read_whole(model, IDS)
    read = read_in_calls(model, cache_for(model, arm, windows), IDS, step)
    if name == "doge":
        own = read_in_calls(model, DynamicCache(config=model.config), IDS, step)
        if distance(own, exact) > 0.5:  # with transformers 5.17
            pytest.skip("this transformers reads no cache of this family right")
    # The codec moves the logits by 0.03 to 1.
    assert distance(read, simulated) <= CLOSE
    assert distance(simulated, exact) > 0.01


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_keys_keep_their_mean_where_attention_depends_on_it(name):
    model = architectures.build(name, torch.float64)
    arm = RotatedCodec(with_means(random_arm(model).rotations))
    with pytest.raises(RotationZooError, match="cannot be centered: attention depends on"):
        cache_for(model, arm, CacheLayout())


def test_a_model_that_takes_only_its_own_cache_is_refused():
    model = architectures.build("minimax", torch.float64)
    with pytest.raises(UnsupportedModel, match="takes only a cache of a class of its own"):
        cache_for(model, random_arm(model), CacheLayout())


FEW = {"num_hidden_layers": 2}
OTHERS = [
    ("qwen3_next", {}, "llama", "layer 0 of Qwen3NextForCausalLM stores no keys"),
    ("llama", FEW, "llama", "for layer 2, and LlamaForCausalLM caches 2"),
    ("deepseek_v3", {}, "llama", "layer 0 has 1 KV heads of 20 channels"),
    ("llama", {}, "deepseek_v3", "layer 0 has 2 KV heads of 16 channels"),
]


@pytest.mark.parametrize(("name", "changes", "others", "says"), OTHERS)
def test_rotations_of_another_model_are_refused(name, changes, others, says):
    """Some by the layers that a model caches, and some by the first rows."""
    rotations = random_arm(architectures.build(others)).rotations
    model = architectures.build(name, **changes)
    with pytest.raises(RotationZooError, match=says):
        read_in_calls(model, RotatedCache(rotations, model), IDS, 24)


def test_layers_that_keep_more_than_keys_and_values_are_refused():
    model = architectures.build("deepseek_v32", torch.float64)
    with pytest.raises(UnsupportedModel, match="keeps a DynamicIndexedLayer, which this cache"):
        cache_for(model, RotatedCodec({}), CacheLayout())


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_centered_and_coded_rows_are_read_as_the_simulation_says(name):
    model, (step, windows) = architectures.build(name, torch.float64), LAYOUTS["chunks"]
    rotations = with_transforms(with_means(random_arm(model).rotations))
    arm, nearest = RotatedCodec(rotations, rounding="transform"), RotatedCodec(rotations)
    other, windows = windows, replace(windows, format=SEGMENTS)
    simulated = simulate(model, arm, windows, IDS)
    read = read_in_calls(model, cache_for(model, arm, windows), IDS, step)
    assert distance(read, simulated) <= CLOSE
    assert distance(simulate(model, nearest, other, IDS), simulated) > 0.01


# ---- latents (MLA): their codes, and keys with RoPE that all stay exact


def test_it_holds_codes_of_latents_and_exact_keys():
    """A latent has 20 elements and a key 8. In 2 bits, a latent takes 5 bytes, and 8 of scales."""
    model = architectures.build("deepseek_v3")
    cache = RotatedCache(random_arm(model).rotations, model, sink=4, recent=8)
    read_in_calls(model, cache, IDS.repeat(1, 2), 48)
    stream = cache.layers[0].streams[0]
    assert list(stream.blocks) == ["latent"]
    assert stream.blocks["latent"].length == 48 - 4 - 8
    assert stream.tail["latent"].shape == (2, 1, 8, 20)
    assert stream.head["latent"].shape == (2, 1, 4, 20)
    assert stream.head["rope"].shape == (2, 1, 40, 8)
    page = stream.blocks["latent"].layout
    assert page.bytes == page.tokens * (5 + 8)
    assert cache.bytes_in_bf16 == 2 * architectures.LAYERS * 2 * 48 * (20 + 8)
