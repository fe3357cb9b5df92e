"""What the benchmarks of real caches count, on models and caches that a CPU runs in a moment."""

from types import SimpleNamespace

import benchmark_memory
import pytest
import torch

from rotationzoo.model.geometry import geometry_of


@pytest.fixture
def memory(monkeypatch):
    """The script on a machine without a GPU."""
    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    monkeypatch.setattr(benchmark_memory, "DEVICE", "cpu")
    return benchmark_memory


TINY = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip


def test_a_cache_is_filled_layer_by_layer(memory):
    model = memory.build_model(TINY, 2048)
    rotations = memory.fit(None, memory.PRESETS["hadamard"], geometry_of(model))
    options = SimpleNamespace(tokens=832)
    report = memory.measure_cache(model, rotations, "vllm", "rows", options)
    blocks, row = 2 * 256, 16 // 4 + 2 * 2
    assert report["tokens"] == 832
    assert report["bytes_held"] == 2 * 2 * (blocks * row + 320 * 16 * 2)
    assert report["bytes_in_bf16"] == 2 * 2 * 832 * 16 * 2
