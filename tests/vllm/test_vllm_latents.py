"""Latents (MLA) in vLLM's CPU engine, against `RotatedCache`."""

import pytest
import torch
from support.recipes import CODED
from support.vllm import NEEDS_VLLM, ON_GPU, TOKENS, serve
from support.vllm_answers import CLOSE, assert_same, differences, read_exact, read_in_transformers
from support.vllm_models import make_served

pytestmark = [
    *NEEDS_VLLM,
    pytest.mark.skipif(bool(ON_GPU), reason="no kernel reads latents on a GPU"),
]
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 32, "beta_slow": 1,
    "original_max_position_embeddings": 512, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip


AMX = torch.cpu._is_amx_tile_supported()
"""Without it, vLLM's platform takes whole prompts, and caches no prefix of latents."""
CHUNK = 256 if AMX else 2048


def test_every_log_probability_is_that_of_the_cache_in_transformers(ids, tmp_path):
    """8e-7 was measured. vLLM's own kernel for RoPE would make .38 here: see `plugin`."""
    model, folder, artifact = make_served("latents", tmp_path)
    options = {"model": str(folder), "prompts_too": True, "enable_prefix_caching": False}
    served = serve(tmp_path, artifact, [[ids[:1100]]], **options)
    (answer,) = served["rounds"][0]
    expected = read_in_transformers(artifact, model, answer["ids"], chunk=CHUNK)
    exact = read_exact(model, answer["ids"])
    assert differences(expected, exact).mean() > 3 * CLOSE, "attention matters"
    assert_same([*answer["prompt"], *answer["answer"]], expected)
    # 64 codes of 2 bits, a scale and an offset in float16, and 16 exact elements in float32
    held, cell = 1 << 30, 64 // 4 + 4 + 16 * 4
    assert served["blocks"] == held // (2 * cell * served["tokens"] // served["blocks"])


def test_transform_coding_cached_prefixes_and_requests_at_the_same_time(ids, tmp_path):
    """With DeepSeek's own scaling of RoPE, and queries that are not compressed."""
    changes = {"rope_parameters": YARN, "max_position_embeddings": 2048, "q_lora_rank": None}
    model, folder, artifact = make_served("latents", tmp_path, CODED, **changes)
    asked = [[ids[:1000]], [ids[:1100]], [ids[:960], ids[70:120]]]
    rounds = serve(tmp_path, artifact, asked, model=str(folder))["rounds"]
    answers = [answer for answers in rounds for answer in answers]
    assert [answer["cached"] for answer in answers] == [0, 896 * AMX, 896 * AMX, 0]
    for answer in answers:
        cut, read = answer["cached"], answer["ids"]
        expected = read_in_transformers(artifact, model, read, chunk=CHUNK, cut=cut)
        assert_same(answer["answer"], expected[-TOKENS:])
