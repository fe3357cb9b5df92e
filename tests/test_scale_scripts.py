"""What the benchmarks of scale rest on: models of published shapes and FLOPs."""

import json
import sys

import benchmark_scale
import pytest
import scale_evaluate
import scale_models
import torch
from scale_models import SHAPES, Shape, interleave, make_model, measure_peak, median_ratio
from support.popular import CONFIGS
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

DENSE = Shape("none", 2, 64, 96, 4, 2, dim=16, vocabulary=20_000)
EXPERTS = Shape("none", 2, 64, 32, 4, 2, experts=8, active=2, dim=16, vocabulary=20_000)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_shapes_are_the_published_ones(shape):
    model = shape.source.split("/")[1].removesuffix("-Instruct")
    published, config = CONFIGS[model], shape.config().to_dict()
    names = [
        "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads",
        "vocab_size", "tie_word_embeddings",
    ]  # fmt: skip
    if published["model_type"] != "llama":  # of which the sizes alone are taken
        names += ["model_type", "max_position_embeddings", "head_dim"]
    for name in names:
        assert config[name] == published[name], name
    width = "moe_intermediate_size" if shape.experts else "intermediate_size"
    assert config[width] == published[width]
    if shape.experts:
        assert (shape.experts, shape.active) == (128, 8)


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


def test_flops_are_those_of_the_matrix_products():
    model, rows, length = make_model(DENSE, device="cpu"), 2, 128
    model.set_attn_implementation("eager")  # its products are counted on a CPU, too
    ids = scale_models.random_text(DENSE, rows, length)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.model(input_ids=ids, use_cache=False)
    # The counter ignores the causal mask, which shows (T + 1) / 2 of T positions.
    attention = 4 * DENSE.heads * DENSE.dim * length * DENSE.layers * rows
    expected = DENSE.forward_flops(rows, length) + attention * (length - (length + 1) / 2)
    # Measured: 8e-5, which are RoPE's angles.
    assert counter.get_total_flops() == pytest.approx(expected, rel=2e-4)
    # A token passes 2 of 8 experts.
    width = 3 * EXPERTS.hidden * EXPERTS.intermediate
    router = EXPERTS.hidden * EXPERTS.experts
    assert EXPERTS.matrix_weights == 2 * 64 * 16 * 6 + router + 2 * width


def test_jobs_take_turns_and_ratios_are_within_a_turn():
    order = []
    times = interleave({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 2)
    assert order == ["a", "b", "a", "b", "b", "a"]
    assert len(times["a"]) == 2
    # The device got slower, and the ratio of each turn stayed.
    assert median_ratio({"a": [1, 2, 4], "b": [2, 4, 8]}, "b", "a") == 2


def test_the_peak_of_the_host_is_that_of_the_block():
    with measure_peak() as peak:
        rows = torch.ones(25_000_000)  # 100 MB
        del rows
    assert 80e6 < peak.host - peak.host_before < 200e6


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
