"""A released vLLM that serves the demo model from our pages, against `RotatedCache`.

`make vllm` installs vLLM in an environment of its own; without it these tests are skipped.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rotationzoo import Artifact, RotatedCache
from rotationzoo.model.source import DEMO

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("ROTATIONZOO_VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed: make vllm"),
]
CHUNK, TOKENS = 256, 24
# Log probabilities in float32, of sums in another order: 3e-6 on average and 3.1e-5 at most were
# measured where no code is that near to a half, and 1.4e-3 at most where one is. Rows that are read
# exact instead of from codes make .045 on average, and 2 at most.
CLOSE, FLIPPED = 1e-3, 0.1
TEXT = (ROOT / "rotationzoo/runtime/layer.py").read_text()


def serve(folder: Path, artifact: Path | None, rounds, tokens=TOKENS, prompts_too=False, **engine):
    """What a vLLM engine answers; `RuntimeError` with its output where it fails."""
    if artifact is not None:
        engine["additional_config"] = {"rotationzoo": {"artifact": str(artifact)}}
    engine = {
        "model": str(DEMO),
        "dtype": "float32",
        "max_model_len": 2048,
        "max_num_batched_tokens": CHUNK,
        "max_num_seqs": 8,
        "enforce_eager": True,
        **engine,
    }
    job = {"engine": engine, "rounds": rounds, "tokens": tokens, "prompts_too": prompts_too}
    (folder / "job.json").write_text(json.dumps(job))
    words = [PYTHON, Path(__file__).with_name("vllm_driver.py"), "job.json", "result.json"]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return json.loads((folder / "result.json").read_text())


def assert_same(found: list[float], expected: list[float]) -> None:
    difference = (torch.tensor(found) - torch.tensor(expected)).abs()
    assert difference.mean() < CLOSE
    assert difference.max() < FLIPPED


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Token ids of different lengths: shorter than the windows, and of several chunks."""
    ids = AutoTokenizer.from_pretrained(DEMO)(TEXT).input_ids
    return [ids[:100], ids[50:450], ids[:1100]]


@pytest.fixture(scope="module")
def alone(made, prompts, tmp_path_factory) -> dict:
    """Each prompt as a request of its own, without prefix caching."""
    folder = tmp_path_factory.mktemp("alone")
    options = {"prompts_too": True, "enable_prefix_caching": False}
    return serve(folder, made, [[ids] for ids in prompts], **options)


def test_every_log_probability_is_that_of_the_cache_in_transformers(made, alone):
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    artifact = Artifact.open(made)
    for (answer,) in alone["rounds"]:
        ids = torch.tensor(answer["ids"])[None]
        prompt = ids.shape[1] - TOKENS
        cache = RotatedCache(artifact, model, format="vllm", prefill_layout="window")
        expected, at = [], 0
        while at < ids.shape[1] - 1:
            end = min(at + CHUNK, prompt) if at < prompt else at + 1
            with torch.no_grad():
                logits = model(ids[:, at:end], past_key_values=cache).logits[0]
            following = ids[0, at + 1 : end + 1]
            read = logits[: len(following)].log_softmax(-1)
            expected += read.gather(1, following[:, None])[:, 0].tolist()
            at = end
        assert_same([*answer["prompt"], *answer["answer"]], expected)


def test_requests_that_preempt_each_other_answer_as_each_alone(made, prompts, tmp_path):
    """Four requests grow to three pages each, and there are nine pages."""
    starts = [prompts[2][150 * number : 150 * number + 200] for number in range(4)]
    engine = {"num_gpu_blocks_override": 10, "max_model_len": 400}
    rounds = [*([ids] for ids in starts), starts]
    served = serve(tmp_path, made, rounds, tokens=150, **engine)
    *alone, together = served["rounds"]
    for (one,), other in zip(alone, together, strict=True):
        assert one["ids"] == other["ids"]
        assert_same(one["answer"], other["answer"])


def test_a_prefix_that_is_there_changes_nothing(made, prompts, tmp_path):
    """While its exact copies are there, as after a request that has just ended."""
    again = serve(tmp_path, made, [[prompts[2]], [prompts[2]]], enable_prefix_caching=True)
    (first,), (second,) = again["rounds"]
    assert second["cached"] > 900
    assert first["ids"] == second["ids"]
    assert_same(first["answer"], second["answer"])


def test_more_blocks_in_the_same_memory_and_vllm_itself_without_an_artifact(
    alone, prompts, tmp_path
):
    """A token of a KV head takes 2 x (16 + 4) bytes, and 2 x 64 x 4 in float32."""
    plain = serve(tmp_path, None, [[prompts[1]]], prompts_too=True, enable_prefix_caching=False)
    assert alone["blocks"] == pytest.approx(plain["blocks"] * 512 / 40, rel=1e-3)
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    (answer,) = plain["rounds"][0]
    ids = torch.tensor(answer["ids"])
    with torch.no_grad():
        read = model(ids[None]).logits[0, :-1].log_softmax(-1)
    exact = read.gather(1, ids[1:, None])[:, 0]
    assert_same([*answer["prompt"], *answer["answer"]], exact.tolist())


def test_an_artifact_of_another_model_ends_the_server_with_a_sentence(made, tmp_path):
    model = Path(shutil.copytree(DEMO, tmp_path / "other"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    with pytest.raises(RuntimeError, match="was made for demo, and not for"):
        serve(tmp_path, made, [[[1, 2, 3]]], model=str(model))
