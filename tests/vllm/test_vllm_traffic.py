"""Requests together in a released vLLM: they are answered as each alone (a short form of
`scripts/bench/ask_traffic.py`), and one with an infinite key ends alone."""

import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from support.codec import on_gpu
from support.jobs import calibrate_short
from support.models import add_tokenizer, edit_config, edited_weights
from support.places import ROOT
from support.vllm import NEEDS_VLLM, ON_GPU, PYTHON, engine_job, environment, hold
from support.vllm_answers import assert_same
from transformers import AutoModelForCausalLM, Qwen3Config

from rotationzoo.model.source import DEMO

pytestmark = NEEDS_VLLM
DEMO_TEXT = (DEMO.parents[1] / "demo/prompt.txt").read_text()
SCRIPT = ROOT / "scripts/bench/ask_traffic.py"


def ask(model: Path, rotations: Path, *options: str) -> dict:
    """What the script measures, of which nothing is off."""
    words = [PYTHON, SCRIPT, "--model", model, "--rotations", rotations, *options]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    told = [line for line in done.stdout.splitlines() if line.startswith('{"')]
    found = json.loads(told[-1])  # an engine may print more when it ends
    assert not found["off"]
    return found


@pytest.mark.skipif(bool(ON_GPU), reason="with larger layers there")
def test_traffic_is_answered_as_each_request_alone(made):
    """Measured in float32: 1e-5, and 0.57 if requests read before their step has stored."""
    sizes = "--prefix=400 --chunks=1024 --answer=4 --round=16 --requests=16 --seed=1"
    found = ask(DEMO, made, "--dtype=float32", "--arms=vllm", *sizes.split())
    assert found["in the same step"]
    assert found["compared"] >= 16
    assert found["largest, compared"] < 1e-3


@on_gpu
def test_traffic_on_a_gpu(device, tmp_path):
    """With layers of Qwen3-8B's shape: in the demo model's, a late store still comes in time.
    Measured: 0.02, and 0.15 to 0.34 before reads waited."""
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=32_000, hidden_size=4096, intermediate_size=12_288, num_hidden_layers=4,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, dtype=torch.bfloat16,
        max_position_embeddings=131_072, architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    folder = tmp_path / "model"
    with torch.device(device):
        AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).save_pretrained(folder)
    add_tokenizer(folder)
    rotations = calibrate_short(folder, tmp_path / "made", device=device).folder
    torch.cuda.empty_cache()
    found = ask(folder, rotations, "--arms=vllm", "--requests=64", "--cache=4")
    assert found["in the same step"] > 4


# ---- a token that makes keys infinite


@pytest.fixture(scope="module")
def bad(tokenizer, tmp_path_factory) -> tuple[Path, Path, int]:
    """The demo model with a token whose embedding is infinite, an artifact of it, and the token."""
    folder = tmp_path_factory.mktemp("bad")
    model = Path(shutil.copytree(DEMO, folder / "model"))
    token = len(tokenizer) - 1
    with edited_weights(model) as weights:
        embedding = weights["model.embed_tokens.weight"]
        weights["lm_head.weight"] = embedding.clone()  # which all requests read
        embedding[token] = torch.inf
    edit_config(model, tie_word_embeddings=False)
    return model, calibrate_short(model, folder / "artifact").folder, token


def test_an_infinite_key_ends_one_request_of_four_which_is_named(bad, tokenizer, tmp_path):
    """In prompts of several chunks, and tokens next to others' prompts. Then others take its pages:
    with vLLM's own cache on a CPU, the answer of one of those was NaN, too."""
    model, made, token = bad
    ids = tokenizer(DEMO_TEXT * 9).input_ids
    prompts = [ids[:100], ids[50:650], ids[:400], ids[30:1130]]
    hit = [*prompts[:2], [*prompts[2][:150], token, *prompts[2][151:]], prompts[3]]
    options = {"model": str(model), "enable_prefix_caching": False}
    options |= {"sampling": {"ignore_eos": True}, "num_gpu_blocks_override": 40}
    job = engine_job(made, [prompts, hit, prompts], **options)
    # In one process, requests of a round are there together, so that steps are the same.
    with hold(tmp_path, job, VLLM_ENABLE_V1_MULTIPROCESSING="0") as result:
        clean, found, after = result["rounds"]
    for number, expected in enumerate(clean):
        assert_same(after[number]["answer"], expected["answer"])
        if number == 2:
            assert all(math.isnan(each) for each in found[2]["answer"])
        else:
            assert found[number]["ids"] == expected["ids"]
            assert_same(found[number]["answer"], expected["answer"])
    named = r"request (\S+): a (\w+) of layer (\d+) is not finite or exceeds 1e\+18: its answer is"
    ((request, *where),) = re.findall(named, (tmp_path / "log").read_text())
    assert (request.split("-")[0], *where) == ("6", "key", "0")
