"""What the benchmarks rest on: their caches, kernels, models and tables, on what a CPU runs in a
moment."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import ablation_tables
import benchmark_memory
import benchmark_scale
import pytest
import scale_evaluate
import scale_models
import torch
import transformers_caches
from ablation_tables import Gain
from benchmark_decode import SHAPES
from decode_arms import exact_arms as list_exact_arms
from decode_arms import exact_error, first_request, packed_variants
from decode_caches import LAYOUTS, Shape, Storage, exact_caches, packed_caches
from scale_models import make_model
from support import architectures
from support.models import write_jsonl
from transformers import AutoModelForCausalLM, Cache
from transformers.cache_utils import QuantizedLayer
from transformers_caches import ThroughCache, TransformersCache

from rotationzoo.codec.attention import attend
from rotationzoo.model.geometry import geometry_of

SHAPE = Shape(batch=2, context=200, heads=4, kv_heads=2, dim=64)
STORAGE = Storage("sglang", page=64, sink=8, recent=64)


@pytest.mark.parametrize("format", LAYOUTS)
def test_random_caches_can_be_read(format):
    caches = packed_caches(SHAPE, replace(STORAGE, format=format), 2, "cpu")
    for side in (caches[1].packed.key, caches[1].packed.value):
        addresses = replace(side, table=None).addresses()
        assert torch.equal(side.addresses(), addresses)
        restored = side.restore()
        assert restored.std() == pytest.approx(1.7, abs=0.2)  # codes of 0 to 3, scales near 1.5
    query = torch.randn(2, 4, 1, 64)
    ((_, read),) = packed_variants(attend, SHAPE)
    output = read(query, caches[1])
    assert torch.equal(read(query[:1], first_request(caches[1])), output[:1])


def test_bytes_are_those_of_the_published_table():
    shapes = [Shape(*map(int, name.split("x"))) for name in SHAPES.split(",")]
    assert shapes[1].bytes == 102_400 * 4096
    assert Storage("sglang").token_bytes(8, 128) == 640
    assert Storage("vllm").token_bytes(8, 128) == 576
    assert Storage("fine").token_bytes(8, 128) == 640
    assert Storage("sglang").bytes(shapes[1]) == 102_080 * 640 + 320 * 4096


def test_every_order_of_a_cache_in_memory_gives_its_own_attention():
    memory, query = exact_caches(SHAPE, 1, "cpu")[0], torch.randn(2, 4, 1, 64).bfloat16()
    for arm in list_exact_arms(SHAPE, None, ()):
        if arm.name == "sdpa flash":
            both = [arm.view(side, SHAPE) for side in memory]
            assert exact_error(arm.read(query, *both), query, *both) < 1e-2


DENSE = scale_models.Shape("none", 2, 64, 96, 4, 2, dim=16, vocabulary=20_000)
EXPERTS = scale_models.Shape(
    "none", 2, 64, 32, 4, 2, experts=8, active=2, dim=16, vocabulary=20_000
)


@pytest.mark.parametrize("shape", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_a_model_made_on_the_device_computes_what_transformers_own_does(shape):
    model = make_model(shape)
    own = AutoModelForCausalLM.from_config(shape.config(), dtype=torch.bfloat16).eval()
    own.load_state_dict(model.state_dict())
    # `cuda` is `cuda:0`, as `cpu:0` is `cpu`.
    again = make_model(shape, device="cpu:0").state_dict()
    assert all(torch.equal(again[name], weight) for name, weight in model.state_dict().items())
    ids = scale_models.random_text(shape, 2, 64)
    with torch.no_grad():
        logits = model(ids).logits
        assert torch.equal(logits, own(ids).logits)
    # Each matrix keeps the variance of the normed rows that it multiplies.
    assert 0.9 < logits.float().std() < 1.1


@pytest.mark.thorough
def test_one_command_measures_and_says_what_it_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(scale_models, "SHAPES", {"dense": DENSE, "experts": EXPERTS})
    monkeypatch.setattr(scale_evaluate, "_WARMING", 384)
    output = tmp_path / "scale.json"
    line = "x --models dense,experts --tokens 512 --length 128 --batch 2 --repeats 1"
    length = ["--evaluate-length", "512"]
    monkeypatch.setattr(sys, "argv", [*line.split(), *length, "--output", str(output)])
    assert benchmark_scale.main() == 0
    content = json.loads(output.read_text())
    measured = [(result["part"], result.get("model")) for result in content["results"]]
    expected = [("statistics", "dense"), ("evaluate", "dense"), ("statistics", "experts")]
    assert measured == expected
    _, evaluated, experts = content["results"]
    assert evaluated["seconds_per_prompt"].keys() == {"exact", "blind", "arm"}
    assert experts["jobs"]["forward"]["flops"] == EXPERTS.forward_flops(4, 128)
    printed = capsys.readouterr().out
    assert "x the forward passes" in printed
    monkeypatch.setattr(benchmark_scale, "measure_evaluate", lambda *_: 1 / 0)
    monkeypatch.setattr(
        sys, "argv", [*line.split(), "--parts", "evaluate", "--output", str(output)]
    )
    assert benchmark_scale.main() == 1
    (failed,) = json.loads(output.read_text())["results"]
    assert failed["error"].startswith("ZeroDivisionError"), "and the other parts would have run"
    monkeypatch.setattr(sys, "argv", [*line.split(), "--seconds", "-1"])
    assert benchmark_scale.main() == 0
    assert "statistics experts: left out" in capsys.readouterr().out


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


IDS = torch.randint(3, 59, (2, 100), generator=torch.Generator().manual_seed(1))
RESIDUAL = 8


class CoarseLayer(QuantizedLayer):
    """A layer with one scale for the whole tensor, in place of libraries that are not installed."""

    def _quantize(self, tensor, axis):
        scale = tensor.abs().amax() / 3
        return (tensor / scale).round(), scale

    def _dequantize(self, quantized):
        codes, scale = quantized
        return codes * scale


class CoarseRows(transformers_caches._RowByRow, CoarseLayer):
    pass


def read_one_by_one(model, row: torch.Tensor, start: int) -> torch.Tensor:
    """Logits of a prefill of `start` tokens and of every token after it."""
    layers = [CoarseLayer(residual_length=RESIDUAL) for _ in model.model.layers]
    past = Cache(layers=layers)
    model(input_ids=row[:, :start], past_key_values=past)
    steps = row[:, start:].split(1, dim=1)
    return torch.cat([model(input_ids=ids, past_key_values=past).logits for ids in steps], dim=1)


@torch.no_grad()
def test_pieces_of_a_batch_are_read_as_single_tokens_are(monkeypatch):
    model = architectures.build("qwen3")
    cache = TransformersCache("hqq", 2, axis=0, residual=RESIDUAL)
    monkeypatch.setattr(transformers_caches, "_HQQLayer", CoarseRows)
    logits = ThroughCache(model, cache)(input_ids=IDS, logits_to_keep=30).logits
    assert cache.prefix(100, 30) == 64
    expected = torch.cat([read_one_by_one(model, row, 64)[:, -30:] for row in IDS.split(1)])
    # Measured: 1.2e-5, of logits up to 10.
    assert (logits - expected).abs().max() < 1e-4
    exact = model(input_ids=IDS).logits[:, -30:]
    assert (logits - exact).abs().max() > 0.01


def line(arm: str, correct: str, logs: list[float]) -> dict:
    task = {"correct": correct, "log_probabilities": logs, "prompts": [2, 2]}
    return {"model": "deep", "setting": "2048", "arm": arm, "tasks": {"needles": task}}


def test_gains_are_paired_by_prompt_and_nats_count_what_the_exact_model_answers(tmp_path):
    lines = [
        line("exact", "1110", [0.0, 0.0, 0.0, -9.0]),
        line("oscar+fb", "1110", [-1.0, -1.0, -1.0, -1.0]),
        line("oscar", "1000", [-2.0, -2.0, -4.0, -9.0]),
    ]
    path = write_jsonl(tmp_path / "part-0.jsonl", lines)
    ((place, arms),) = ablation_tables.read_lines([path]).items()
    assert place == ("deep", "2048")
    gain = ablation_tables.measure_gain(arms, "oscar+fb", "oscar")
    # Each of the two prompts gains one answer of four: there is no spread.
    assert gain.points == 50
    assert gain.points_error == 0
    assert gain.nats == pytest.approx((1 + 1 + 3) / 3)
    assert ablation_tables.measure_gain(arms, "oscar", "hadamard") is None


def test_a_model_that_answers_nothing_is_left_out(tmp_path):
    path = write_jsonl(tmp_path / "part-0.jsonl", [line("exact", "0000", [-9.0] * 4)])
    assert ablation_tables.read_lines([path]) == {}


@pytest.mark.parametrize(
    ("points", "kept"),
    [
        ({"a": [2.0, 2.0], "b": [0.5, 0.5]}, True),
        ({"a": [0.1, 0.1], "b": [0.1, 0.1]}, False),  # less than a standard error
        ({"a": [9.0, 9.0], "b": [-2.0, -2.0]}, False),  # one model loses clearly
        ({"a": [9.0, 9.0], "b": [-0.9, -0.9]}, True),  # but not a point
    ],
)
def test_a_step_stays_by_the_rule(points, kept):
    gains = {
        model: [Gain(each, 0.5, 0.0, 0.1) for each in of_model]
        for model, of_model in points.items()
    }
    assert ablation_tables.stays(gains) == kept
