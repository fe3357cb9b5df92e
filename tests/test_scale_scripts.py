"""What the benchmarks of scale rest on: models of published shapes and FLOPs."""

import json
import sys

import benchmark_scale
import pytest
import scale_evaluate
import scale_models
import torch
from scale_models import Shape, make_model
from transformers import AutoModelForCausalLM

DENSE = Shape("none", 2, 64, 96, 4, 2, dim=16, vocabulary=20_000)
EXPERTS = Shape("none", 2, 64, 32, 4, 2, experts=8, active=2, dim=16, vocabulary=20_000)


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
