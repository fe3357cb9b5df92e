"""What the benchmarks rest on: their models, caches and tables, on what a CPU runs in a moment."""

from types import SimpleNamespace

import benchmark_cache
import pytest
import random_models
import torch
from benchmark_pages import Shape, bound_of
from random_models import make_model
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from rotationzoo import RotatedCache


def test_bytes_are_those_of_the_published_table():
    shape = Shape(1, 102_400)
    assert shape.bytes == 102_400 * 4096
    assert bound_of(shape, "sglang") == 102_080 * 640 + 320 * 4096
    assert bound_of(shape, "vllm") == 102_080 * 576 + 320 * 4096
    assert bound_of(Shape(8, 102_400), "fine") == 8 * (102_080 * 640 + 320 * 4096)


DENSE = random_models.Shape(2, 64, 96, 4, 2, dim=16, vocabulary=20_000)
EXPERTS = random_models.Shape(2, 64, 32, 4, 2, experts=8, active=2, dim=16, vocabulary=20_000)


@pytest.mark.parametrize("shape", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_a_model_made_on_the_device_computes_what_transformers_own_does(shape):
    model = make_model(shape)
    own = AutoModelForCausalLM.from_config(shape.config(), dtype=torch.bfloat16).eval()
    own.load_state_dict(model.state_dict())
    # `cuda` is `cuda:0`, as `cpu:0` is `cpu`.
    again = make_model(shape, device="cpu:0").state_dict()
    assert all(torch.equal(again[name], weight) for name, weight in model.state_dict().items())
    ids = random_models.random_text(shape.vocabulary, 2, 64)
    with torch.no_grad():
        logits = model(ids).logits
        assert torch.equal(logits, own(ids).logits)
    # Each matrix keeps the variance of the normed rows that it multiplies.
    assert 0.9 < logits.float().std() < 1.1


def test_a_cache_is_filled_layer_by_layer_and_decodes():
    model = make_model(random_models.Shape(2, 32, 32, 2, 1, dim=16, vocabulary=64))
    options = SimpleNamespace(tokens=832, steps=2, formats=["vllm"], readings=["rows"])
    arms = {}
    with torch.no_grad():
        for name, create, steps in benchmark_cache.list_caches(model, options):
            cache = create()
            arms[name] = benchmark_cache.measure_cache(model, cache, options, steps)
            assert arms[name]["tokens"] == 832
            assert isinstance(cache, DynamicCache | StaticCache | RotatedCache)
    report = arms["vllm, rows"]
    blocks, row = 2 * 256, 16 // 4 + 2 * 2
    assert report["bytes_held"] == 2 * 2 * (blocks * row + 320 * 16 * 2)
    assert report["bytes_in_bf16"] == arms["DynamicCache"]["bytes_held"] == 2 * 2 * 832 * 16 * 2
    assert f"| vllm, rows | 0.00 | 0.00 | 1 / {report['smaller']:.2f} |" in (
        benchmark_cache.table(arms | {"other": {"error": "OutOfMemoryError"}})
    )
