"""Other models in a released vLLM: those that draft tokens, against the same without drafts, and
those whose layers have states or latents (MLA), against `RotatedCache`."""

import json
from collections import namedtuple

import pytest
import torch
from support.hybrids import calibrate_hybrid
from support.jobs import calibrate_short
from support.recipes import CODED
from support.vllm import NEEDS_VLLM, NGRAMS, ON_GPU, drive, engine_job, serve, serve_in_turn
from support.vllm_answers import (
    CLOSE,
    FLIPPED_EARLY,
    assert_answers,
    assert_same,
    cell_of,
    differences,
    read_exact,
    read_in_transformers,
)
from support.vllm_models import (
    LARGE_LATENTS,
    make_served,
    save_head,
    save_latents_with_mtp,
    save_with_mtp,
)

from rotationzoo.model.source import DEMO

pytestmark = NEEDS_VLLM
ANSWER = 40  # tokens
# A prompt is cut into the same chunks, however many tokens others have in the step.
ENGINE = {
    "max_model_len": 800,
    "block_size": 128,
    "max_num_batched_tokens": 1024,
    "long_prefill_token_threshold": 128,
    "disable_log_stats": False,
}
DRAFTED, ACCEPTED = (f"vllm:spec_decode_num_{each}_tokens" for each in ("draft", "accepted"))


@pytest.fixture(scope="module")
def prompts(ids) -> list[list[int]]:
    """A text that repeats itself, one that does not, and four that preempt each other."""
    starts = [ids[at : at + 235] for at in range(0, 600, 150)]
    return [ids[:90] * 3, ids[300:750], *starts]


@pytest.fixture(scope="module")
def without(coded, prompts, tmp_path_factory) -> dict:
    """The answers without drafts."""
    folder = tmp_path_factory.mktemp("without")
    return serve(folder, coded.folder, [prompts], ANSWER, prompts_too=True, **ENGINE)


def said_of(answer: dict) -> list[float]:
    """All log probabilities that an engine was asked for."""
    return [*answer["prompt"], *answer["answer"]]


def assert_drafted(served: dict, without: dict, rounds: list[list[list[int]]]) -> tuple[int, int]:
    """Compare tokens and log probabilities. Returns the numbers of accepted and other drafts."""
    expected = {tuple(each["ids"][:-ANSWER]): each for each in without["rounds"][0]}
    for asked, answers in zip(rounds, served["rounds"], strict=True):
        for prompt, answer in zip(asked, answers, strict=True):
            other = expected[tuple(prompt)]
            assert answer["ids"] == other["ids"]
            said = said_of(answer)
            # 1.2e-5 was measured, and codes that flip would make more.
            assert differences(said, said_of(other)[-len(said) :]).max() < CLOSE
    accepted, drafted = (int(served["counted"][name]) for name in (ACCEPTED, DRAFTED))
    return accepted, drafted - accepted


def test_ngrams_with_a_budget_cached_prefixes_and_requests_that_preempt_each_other(
    coded, without, prompts, tmp_path
):
    """In nine blocks of 128 tokens, of which the four last requests would take twelve."""
    rounds = [prompts[:2], [prompts[1]], prompts[2:]]
    engine = ENGINE | {"num_gpu_blocks_override": 10, "enable_prefix_caching": True}
    drafts = NGRAMS | {"num_speculative_tokens": 3}
    served = serve(tmp_path, coded.folder, rounds, ANSWER, speculative_config=drafts, **engine)
    accepted, rejected = assert_drafted(served, without, rounds)
    assert min(accepted, rejected) > 50, "134 and 199 were measured"
    assert served["rounds"][1][0]["cached"] == 384
    assert served["counted"]["vllm:num_preemptions"] > 0


@pytest.mark.parametrize(("method", "layers"), [("draft_model", 4), ("eagle", 1)])
def test_a_draft_models_own_cache_keeps_the_backend_of_vllm(
    method, layers, coded, without, prompts, tmp_path
):
    """Of 2 x 64 x 4 bytes a token, KV head and layer. The demo model drafts for itself."""
    model = str(DEMO) if method == "draft_model" else str(save_head(tmp_path / "head"))
    drafts = {"method": method, "model": model, "num_speculative_tokens": 3}
    options = ENGINE | {"prompts_too": True, "speculative_config": drafts}
    served = serve(tmp_path, coded.folder, [prompts[:2]], ANSWER, **options)
    accepted, rejected = assert_drafted(served, without, [prompts[:2]])
    assert {"draft_model": accepted, "eagle": rejected}[method] > 20, "60 and 234 were measured"
    cells = sum(map(cell_of, coded.rotations.values()))
    share = cells / (cells + 512 * layers)
    assert served["blocks"] == pytest.approx(without["blocks"] * share, rel=1e-2)


def test_an_mtp_heads_cache_keeps_the_backend_of_vllm(prompts, tmp_path):
    """A token of a KV head takes 40 bytes in the model's layer, and 2 x 64 x 4 in the head's."""
    model, asked = str(save_with_mtp(tmp_path / "model")), prompts[:2]
    artifact = calibrate_short(model, tmp_path / "artifact", tokens=1024).folder
    options = {"tokens": ANSWER, "prompts_too": True, "model": model, **ENGINE}
    drafts = {"method": "mtp", "num_speculative_tokens": 3}
    kinds = {}, {"speculative_config": drafts}
    jobs = [engine_job(artifact, [asked], **options, **kind) for kind in kinds]
    without, served = serve_in_turn(tmp_path, jobs)
    accepted, rejected = assert_drafted(served, without, [asked])
    assert min(accepted, rejected) > 15, "31 and 113 were measured"
    assert served["blocks"] == pytest.approx(without["blocks"] * 40 / (40 + 512), rel=1e-2)


# ---- layers with states next to keys and values


Served = namedtuple("Served", "model folder artifact answers plain")


@pytest.fixture(scope="module")
def served(ids, tmp_path_factory) -> dict[str, Served]:
    """The answers of engines; on a GPU, also with vLLM's own cache. vLLM's CPU engine has no kernel
    for Jamba's layers, but makes its blocks."""
    folder = tmp_path_factory.mktemp("hybrids")
    prompt = ids[:1100]
    asked = {
        # A GPU's blocks are smaller, so that a prompt that is cached is cut into other chunks.
        "falcon_h1": ([[prompt], [prompt]], {"enable_prefix_caching": not ON_GPU}),
        "granite_h": ([[prompt]], {"enable_prefix_caching": False, "prompts_too": True}),
        "jamba": ([], {"enable_prefix_caching": False}),
    }
    made = {name: calibrate_hybrid(name, folder) for name in asked}
    artifacts = {name: each[2].folder for name, each in made.items()}
    answers = []
    for with_artifact in (True, False) if ON_GPU else (True,):
        jobs = []
        for name, (rounds, options) in asked.items():
            artifact = artifacts[name] if with_artifact else None
            jobs.append(engine_job(artifact, rounds, model=str(made[name][1]), **options))
        answers.append(dict(zip(asked, serve_in_turn(folder, jobs), strict=True)))
    ours, plain = answers[0], answers[-1]
    return {
        name: Served(*made[name][:2], artifacts[name], ours[name], plain[name]) for name in asked
    }


@pytest.mark.parametrize("name", ["falcon_h1", "granite_h"])
def test_every_log_probability_is_that_of_the_cache_in_transformers(served, name):
    """The second request to Falcon-H1 finds two blocks of 512 tokens, and the state after them. On
    a GPU, vLLM's kernels for states round products of float32, with its own cache, too."""
    model, _, artifact, answers, plain = served[name]
    rounds = [answer for (answer,) in answers["rounds"]]
    rounding = 0.0
    for (answer,) in plain["rounds"] if ON_GPU else []:
        said = said_of(answer)
        exact = read_exact(model, answer["ids"])[-len(said) :]
        rounding = max(rounding, differences(said, exact).mean().item())
    if not ON_GPU:
        assert [answer["cached"] for answer in rounds] == [0, 1024][: len(rounds)]
    for answer in rounds:
        expected = read_in_transformers(artifact, model, answer["ids"], cut=answer["cached"])
        found, exact = said_of(answer), read_exact(model, answer["ids"])
        if ON_GPU:
            far = differences(found, expected[-len(found) :]).mean()
            print(f"measured {far:.1e}, and of vLLM's own cache {rounding:.1e}")
            assert far < 5 * rounding
        else:
            assert_same(found, expected[-len(found) :], FLIPPED_EARLY)
        assert differences(expected, exact).mean() > 10 * CLOSE, "attention matters"


@pytest.mark.skipif(bool(ON_GPU), reason="vLLM's GPU engine answers them correctly")
def test_drafts_and_states_are_refused_on_a_cpu(served, tmp_path):
    made = served["granite_h"]
    drafts = "--speculative-config", json.dumps({**NGRAMS, "num_speculative_tokens": 3})
    command = ["serve", str(made.folder), "--rotations", str(made.artifact), "--dry-run", "--"]
    (end,) = drive(tmp_path, {"commands": [[*command, *drafts]]})
    assert "rotations are not served with drafts and states on a CPU" in end["err"]


@pytest.mark.skipif(bool(ON_GPU), reason="a GPU's blocks are smaller")
def test_blocks_are_as_large_as_a_state(served):
    """A token of two KV heads takes 48 bytes, and a state of Jamba 256 x (16 + 3) x 4. So a block
    has four times 128 tokens. A request of 2,048 takes four, and one for each layer's state."""
    answers = served["jamba"].answers
    assert answers["blocks"] == (1 << 30) // (512 * 48)
    assert answers["capacity"] == answers["blocks"] * 2048 // (4 + 3)


# ---- latents (MLA)


ON_CPU = pytest.mark.skipif(bool(ON_GPU), reason="no kernel reads latents in float32")
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 32, "beta_slow": 1,
    "original_max_position_embeddings": 512, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
LATENT_CHUNK = 256 if torch.cpu._is_amx_tile_supported() else 2048
"""Without AMX, vLLM's platform takes whole prompts, and caches no prefix of latents."""
WITH_AMX = 'sys._getframe(1).f_code.co_filename.endswith("platforms/cpu.py")'
"""What vLLM's platform gets if it asks, so that all CPUs read chunks here."""


@ON_CPU
def test_latents_are_read_as_by_the_cache_in_transformers(ids, tmp_path):
    """8e-7 was measured. vLLM's own kernel for RoPE would make 0.38 here: see `plugin`."""
    model, folder, artifact = make_served("latents", tmp_path)
    options = {"model": str(folder), "prompts_too": True, "enable_prefix_caching": False}
    served = serve(tmp_path, artifact, [[ids[:1100]]], **options)
    (answer,) = served["rounds"][0]
    expected = read_in_transformers(artifact, model, answer["ids"], chunk=LATENT_CHUNK)
    exact = read_exact(model, answer["ids"])
    assert differences(expected, exact).mean() > 3 * CLOSE, "attention matters"
    assert_same([*answer["prompt"], *answer["answer"]], expected)
    # 128 codes of 2 bits, a scale and an offset in float16, and 16 exact elements in float32
    held, cell = 1 << 30, 128 // 4 + 4 + 16 * 4
    assert served["blocks"] == held // (2 * cell * served["tokens"] // served["blocks"])


@ON_CPU
def test_transform_coding_cached_prefixes_and_requests_at_the_same_time(ids, tmp_path, another):
    """With DeepSeek's own scaling of RoPE, and queries that are not compressed."""
    changes = {"rope_parameters": YARN, "max_position_embeddings": 2048, "q_lora_rank": None}
    model, folder, artifact = make_served("latents", tmp_path, CODED, **changes)
    asked = [[ids[:1000]], [ids[:1100]], [ids[:960], ids[70:120]]]
    lines = "import sys, torch", f"torch.cpu._is_amx_tile_supported = lambda: {WITH_AMX}"
    served = serve(tmp_path, artifact, asked, variables=another(*lines), model=str(folder))
    answers = [answer for answers in served["rounds"] for answer in answers]
    assert [answer["cached"] for answer in answers] == [0, 896, 896, 0]
    assert_answers(artifact, model, answers)


@ON_CPU
def test_latents_with_drafted_ngrams_and_in_two_processes(ids, tmp_path, monkeypatch):
    """Each process holds all latents, and reads them with its query heads."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    model, folder, artifact = make_served("latents", tmp_path, CODED)
    prompts = [ids[:90] * 5, ids[:700]]
    drafts = NGRAMS | {"num_speculative_tokens": 3}
    options = {"tensor_parallel_size": 2, "speculative_config": drafts}
    options |= {"disable_log_stats": False, "max_num_batched_tokens": 2048}
    served = serve(tmp_path, artifact, [prompts], model=str(folder), **options)
    assert_answers(artifact, model, served["rounds"][0], chunk=2048)
    assert int(served["counted"][DRAFTED]) > 20


@ON_CPU
def test_latents_with_a_draft_model_that_caches_heads(ids, tmp_path):
    """With vLLM's own cache, its CPU engine finds no block size for both."""
    model, folder, artifact = make_served("latents", tmp_path, CODED)
    drafts = {"method": "draft_model", "model": str(DEMO), "num_speculative_tokens": 3}
    options = {"speculative_config": drafts, "disable_log_stats": False}
    options |= {"model": str(folder), "max_num_batched_tokens": 2048}
    served = serve(tmp_path, artifact, [[ids[:90] * 5, ids[:700]]], **options)
    assert_answers(artifact, model, served["rounds"][0], chunk=2048)
    assert int(served["counted"][DRAFTED]) > 20


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_latents_on_a_gpu_are_as_close_as_those_of_vllm(ids, tmp_path):
    """Chunks of prompts, cached prefixes and requests at the same time, in float16."""
    model, folder, artifact = make_served("latents", tmp_path, CODED, **LARGE_LATENTS)
    options = {"model": str(folder), "dtype": "float16"}
    asked = [[ids[:1000]], [ids[:1100]], [ids[:960], ids[70:120]]]
    jobs = [engine_job(artifact, asked, **options)]
    whole = options | {"prompts_too": True}
    jobs += [engine_job(each, asked[1:2], **whole) for each in (artifact, None)]
    *ours, plain = serve_in_turn(tmp_path, jobs)
    (own,) = plain["rounds"][0]
    rounding = differences(said_of(own), read_exact(model, own["ids"])).mean()
    for answer in [each for served in ours for answers in served["rounds"] for each in answers]:
        expected = read_in_transformers(artifact, model, answer["ids"], cut=answer["cached"])
        said, exact = said_of(answer), read_exact(model, answer["ids"])
        far = differences(said, expected[-len(said) :]).mean()
        print(
            f"measured {far:.3f}; vLLM's own {rounding:.3f}; {answer['cached']} cached;"
            f" codes {differences(expected, exact).mean():.3f}"
        )
        assert far < 2 * rounding


@pytest.mark.skipif(not ON_GPU, reason="vLLM's CPU engine finds no block size for both")
def test_latents_with_mtp_on_a_gpu(ids, tmp_path):
    """The head caches latents as vLLM does."""
    model = str(save_latents_with_mtp(tmp_path / "model"))
    artifact = calibrate_short(model, tmp_path / "artifact", CODED).folder
    drafts = {"method": "mtp", "num_speculative_tokens": 3}
    options = {"tokens": ANSWER, "model": model, "dtype": "float16", "disable_log_stats": False}
    kinds = {}, {"speculative_config": drafts}
    asked = [ids[:90] * 5, ids[:700]]
    jobs = [engine_job(artifact, [asked], **options, **kind) for kind in kinds]
    without, served = serve_in_turn(tmp_path, jobs)
    for answer, other in zip(served["rounds"][0], without["rounds"][0], strict=True):
        far = differences(answer["answer"], other["answer"]).mean()
        print(f"measured {far:.4f}")
        assert answer["ids"] == other["ids"]
        assert far < 0.02  # rounding in float16
    accepted, drafted = (int(served["counted"][name]) for name in (ACCEPTED, DRAFTED))
    assert min(accepted, drafted - accepted) > 5, (accepted, drafted)
