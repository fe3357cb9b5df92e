"""Models whose layers have states beside keys and values in a released vLLM."""

from collections import namedtuple

import pytest
from support.hybrids import calibrate_hybrid
from support.places import ROOT
from support.vllm import NEEDS_VLLM, ON_GPU, engine_job, serve_in_turn
from support.vllm_answers import (
    CLOSE,
    assert_same,
    differences,
    read_exact,
    read_in_transformers,
)
from transformers import AutoTokenizer

from rotationzoo.model.source import DEMO

pytestmark = NEEDS_VLLM
Served = namedtuple("Served", "model artifact answers")


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> dict[str, Served]:
    """What engines answer, one after another. vLLM's CPU engine has no kernel for Jamba's layers,
    but makes its blocks."""
    folder = tmp_path_factory.mktemp("hybrids")
    ids = AutoTokenizer.from_pretrained(DEMO)((ROOT / "rotationzoo/cache/layer.py").read_text())
    prompt = ids.input_ids[:1100]
    asked = {
        # A GPU's blocks are smaller, so that a prompt that is cached is cut into other chunks.
        "falcon_h1": ([[prompt], [prompt]], {"enable_prefix_caching": not ON_GPU}),
        "granite_h": ([[prompt]], {"enable_prefix_caching": False, "prompts_too": True}),
        "jamba": ([], {"enable_prefix_caching": False}),
    }
    made = {name: calibrate_hybrid(name, folder) for name in asked}
    jobs = []
    for name, (rounds, options) in asked.items():
        _, model, artifact = made[name]
        jobs.append(engine_job(artifact.folder, rounds, model=str(model), **options))
    answers = serve_in_turn(folder, jobs)
    return {
        name: Served(made[name][0], made[name][2].folder, answer)
        for name, answer in zip(asked, answers, strict=True)
    }


@pytest.mark.parametrize("name", ["falcon_h1", "granite_h"])
def test_every_log_probability_is_that_of_the_cache_in_transformers(served, name):
    """The second request to Falcon-H1 finds two blocks of 512 tokens, and the state after them."""
    model, artifact, answers = served[name]
    rounds = [answer for (answer,) in answers["rounds"]]
    if not ON_GPU:
        assert [answer["cached"] for answer in rounds] == [0, 1024][: len(rounds)]
    for answer in rounds:
        expected = read_in_transformers(artifact, model, answer["ids"], cut=answer["cached"])
        found, exact = [*answer["prompt"], *answer["answer"]], read_exact(model, answer["ids"])
        assert_same(found, expected[-len(found) :])
        assert differences(expected, exact).mean() > 10 * CLOSE, "attention matters"


@pytest.mark.skipif(bool(ON_GPU), reason="a GPU's blocks are smaller")
def test_blocks_are_as_large_as_a_state(served):
    """A token of two KV heads takes 48 bytes, and a state of Jamba 256 x (16 + 3) x 4. So a block
    has four times 128 tokens. A request of 2,048 takes four, and one for each layer's state."""
    answers = served["jamba"].answers
    assert answers["blocks"] == (1 << 30) // (512 * 48)
    assert answers["capacity"] == answers["blocks"] * 2048 // (4 + 3)
