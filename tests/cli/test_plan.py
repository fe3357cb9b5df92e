"""`rotationzoo plan`: what it prints, and that it does not wait for torch."""

import json

import pytest
from support.command_line import succeeded
from support.models import save_family
from support.popular import CONFIGS, remember_shape
from support.published import ok

LONG = "plan", "Qwen3-8B", "--context", "131072"


@pytest.fixture(autouse=True)
def each_shape_once(monkeypatch):
    monkeypatch.setattr("rotationzoo.capacity.plan.read_shape", remember_shape)


@pytest.fixture
def qwen3_8b(inside):
    """The config of Qwen3-8B in a folder of that name, with 4 layers."""
    config = CONFIGS["Qwen3-8B"] | {"num_hidden_layers": 4}
    (inside.folder / "Qwen3-8B").mkdir()
    (inside.folder / "Qwen3-8B" / "config.json").write_text(json.dumps(config))


def test_json(inside, qwen3_8b):
    report = ok(inside(*LONG, "--gpu", "H100", "--format", "vllm", "--json"))
    assert report["kv_bytes_per_token"]["bf16"] == 16_384
    assert report["bits_per_element"] == pytest.approx(2.25 + 16 * 384 / 131_072)
    assert report["max_context"].keys() == report["max_requests"].keys()
    assert report["max_context"]["int2"] > 6 * report["max_context"]["bf16"] > 0
    assert [card["name"] for card in report["cards"]][-3:] == ["H200", "B200", "MI300X"]
    assert report["fits"] is True
    folder = "rotations/Qwen3-8B-oscar"
    assert report["commands"] == [
        "rotationzoo calibrate Qwen3-8B --quick",
        f"rotationzoo generate Qwen3-8B --rotations {folder} --format vllm",
        f"rotationzoo serve Qwen3-8B --rotations {folder} --max-model-len 131072 --max-num-seqs 1",
    ]


@pytest.mark.parametrize(("bits", "name"), [(None, "transform"), (2.25, "transform-2.25-bits")])
def test_the_budget_that_calibrate_spends_is_planned(inside, qwen3_8b, bits, name):
    words = ["--gpu", "2x24GiB", "--requests", "8", "--context", "32768"]
    given = [] if bits is None else ["--bits", str(bits)]
    report = ok(inside("plan", "Qwen3-8B", *words, *given, "--json"))
    expected = (bits or 2.5) + 16 * 384 / 32_768
    assert report["bits_per_element"] == pytest.approx(expected)
    calibrate, _, serve = report["commands"]
    assert calibrate == " ".join(["rotationzoo calibrate Qwen3-8B", *given])
    assert serve == (
        f"rotationzoo serve Qwen3-8B --rotations rotations/Qwen3-8B-{name} "
        "--max-model-len 32768 --max-num-seqs 8 --tensor-parallel-size 2"
    )


def test_a_request_has_no_more_tokens_than_the_model_has_positions(inside, qwen3_8b):
    shown = inside("plan", "Qwen3-8B").stdout
    assert shown.startswith("Yes: 24GiB holds 1 request of 40,960 tokens")
    assert "Note: no --gpu was given: 24GiB is assumed\n" in shown
    assert "Note: 40,960 positions: longer requests need RoPE scaling\n" in shown
    assert "assumed" not in inside("plan", "Qwen3-8B", "--gpu", "24GiB").stdout
    asked = inside(*LONG).stdout
    assert "made for 40,960 positions: 131,072 tokens need RoPE scaling" in asked
    assert "--rope-scaling yarn:4" in asked


def test_an_unusual_model_is_built_without_noise(inside):
    """A hybrid one, of which transformers warns that fast kernels are missing."""
    save_family("qwen3_5", inside.folder / "hybrid", weights=False)
    result = succeeded(inside("plan", "hybrid", "--json"))
    assert "kernel" not in result.stderr
    report = json.loads(result.stdout)
    assert (report["layers"], report["state_bytes_per_request"]) == (1, 14_592)
    assert report["weights_from"] == "config"


def test_latents_are_planned_for_our_own_cache(inside):
    save_family("deepseek_v3", inside.folder / "deepseek", weights=False)
    report = ok(inside("plan", "deepseek", "--json"))
    assert report["layers"] == 4
    steps = [command.split()[1] for command in report["commands"]]
    assert steps == ["calibrate", "generate"], "no engine with a pair of files takes latents"
