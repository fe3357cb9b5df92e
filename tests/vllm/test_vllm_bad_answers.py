"""A token that makes keys infinite, in a released vLLM: whose answer is NaN then, and who is named.

`make vllm` installs vLLM in an environment of its own; without it these tests are skipped.
"""

import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from support.jobs import calibrate_short
from support.models import edit_config, edited_weights
from support.vllm import NEEDS_VLLM, engine_job, hold
from support.vllm_answers import assert_same

from rotationzoo.model.source import DEMO

pytestmark = NEEDS_VLLM
TEXT = (DEMO.parents[1] / "demo/prompt.txt").read_text()


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
    """In prompts of several chunks, and tokens beside others' prompts. Then others take its pages:
    with vLLM's own cache on a CPU, the answer of one of those was no number either."""
    model, made, token = bad
    ids = tokenizer(TEXT * 9).input_ids
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
