"""What the benchmarks of real caches count, on models and caches that a CPU runs in a moment."""

from types import SimpleNamespace

import benchmark_generate
import benchmark_memory
import cache_contenders
import pytest
import torch
from benchmark_caches import comparisons
from cache_contenders import (
    Contender,
    ThroughCalls,
    exact_cache,
    held_bytes,
    measure_decoding,
    rotated_cache,
)
from cache_readers import answers_of, losses_of
from compare_answers import Arm, Measured, Reply
from support import architectures
from test_transformers_caches import CoarseLayer
from transformers import Cache, DynamicCache

from rotationzoo import RotatedCache
from rotationzoo.model.geometry import geometry_of
from rotationzoo.recall.prompts import Prompt, Question

IDS = torch.randint(3, 59, (2, 120), generator=torch.Generator().manual_seed(1))


class Composed:
    """A tensor that is made of others, as quanto's are."""

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None


class ComposedLayer(CoarseLayer):
    def _quantize(self, tensor, axis):
        codes, scale = super()._quantize(tensor, axis)
        return Composed(codes.to(torch.uint8), {"scale": scale})

    def _dequantize(self, quantized):
        return super()._dequantize((quantized.codes, quantized.scale["scale"]))


def test_bytes_of_a_quantized_cache_are_those_of_its_tensors():
    cache = Cache(layers=[ComposedLayer(residual_length=8)])
    for tokens in (10, 3):
        cache.update(torch.ones(1, 2, tokens, 4), torch.ones(1, 2, tokens, 4), 0)
    quantized, residual = 2 * 10 * 4 + 4, 4 * 2 * 3 * 4  # codes and a scale; exact tokens
    assert held_bytes(cache) == 2 * (quantized + residual)


@torch.no_grad()
def test_a_model_read_through_calls_gives_its_logits():
    model = architectures.build("qwen3")
    reader = exact_cache(model, 7).reader
    logits = reader(input_ids=IDS, logits_to_keep=50).logits
    # Measured: 5e-6, of logits up to 10.
    assert torch.allclose(logits, model(input_ids=IDS).logits[:, -50:], atol=1e-4)


@torch.no_grad()
def test_losses_and_answers_are_read_through_any_cache():
    """An exact cache gives those of the model."""
    model = architectures.build("qwen3")
    ids = torch.randint(3, 59, (2, 40), generator=torch.Generator().manual_seed(0))
    through = exact_cache(model, step=4).reader
    losses = losses_of(model, ids, 24)
    assert torch.allclose(losses_of(through, ids, 24), losses, atol=1e-5)
    prompts = [Prompt(row, (Question("any", slice(30, 34), 4),)) for row in ids]
    expected, answers = (answers_of(either, prompts, 2) for either in (model, through))
    assert torch.equal(answers.correct, expected.correct)
    assert torch.allclose(answers.log_probability, expected.log_probability, atol=1e-4)


def test_bits_are_those_held_while_decoding(monkeypatch):
    model, period = architectures.build("qwen3"), 16
    monkeypatch.setattr(cache_contenders, "_PERIOD", period)
    monkeypatch.setattr(cache_contenders, "_STEPS", period)
    geometry = geometry_of(model)

    def bits(contender: Contender) -> float:
        contender = Contender(contender.name, contender.reader, contender.create, period)
        return measure_decoding(model, geometry, contender, IDS[:1])["bits"]

    assert bits(exact_cache(model, 7)) == 32, "float32"
    small = {"format": "vllm", "sink": 8, "recent": 8}
    rotated = rotated_cache(model, "none", None, 7, **small)
    assert isinstance(rotated.reader, ThroughCalls)
    assert rotated.name == "none, vllm, windows 8/8"
    # A block of 256 tokens is there whole, though only some of it is used.
    blocks = 256 * bits_of_codes(geometry) + 16 * 32
    assert bits(rotated) == pytest.approx(sum(blocks / (104 + n) for n in range(1, 17)) / 16)


def bits_of_codes(geometry) -> float:
    """Per element: 2, and a float16 scale and minimum a row."""
    return 2 + 2 * 16 / geometry[0].key_dim


def test_caches_are_compared_with_those_that_hold_as_much():
    arms = {}
    for name, bits, answered in (("hqq-2", 3, 1), ("feedback", 2.9, 4), ("larger", 3.1, 4)):
        replies = {("needles", number): Reply(answered, -2.0, 8) for number in range(3)}
        arms[name] = Arm(replies, [1.0], bits)
    (line,) = comparisons(Measured("demo", arms, {}))
    assert line.startswith("* feedback (2.90 bits) beside hqq-2 (3.00): +37.5 ± 0.0 % answers")


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


class SmallMemory(DynamicCache):
    """A cache for which there is no memory any more after some tokens."""

    def update(self, key, value, index, **options):
        if self.get_seq_length() >= 2048:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmuch")
        return super().update(key, value, index, **options)


def test_running_out_of_memory_is_an_outcome(memory):
    model = memory.build_model(TINY, 4096)
    failed = memory.generate(model, SmallMemory(config=model.config), 2100)
    assert "fails after 2,048 tokens (OutOfMemoryError: CUDA out" in memory.outcome(failed)
    finished = memory.generate(model, RotatedCache(None, model), 2100)
    assert (finished["tokens"], finished["stored_tokens"]) == (8, 2107)
    assert memory.outcome(finished).startswith("generates 8 tokens")


def test_speeds_stand_beside_the_fastest_exact_cache():
    sizes = {"step_milliseconds": 10.0, "cache_gib": 1.0, "peak_gib": 2.0}
    speeds = {"DecodingGraph": 100.0, "DynamicCache, bfloat16": 40.0, "StaticCache, bfloat16": 50.0}
    arms = {name: {**sizes, "tokens_per_second": speed} for name, speed in speeds.items()}
    arms["RotatedCache, rows"] = {"error": "OutOfMemoryError: too large"}
    lines = benchmark_generate.table(arms).splitlines()
    assert lines[2] == "| DecodingGraph | 100.0 | 10.0 | 2.00 | 1.00 | 2.00 |"
    assert lines[5] == "| RotatedCache, rows | OutOfMemoryError: too large | | | | |"
