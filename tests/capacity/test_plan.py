"""GPUs by name and by size, what fits one, and the answer in words."""

import json

import pytest
from support.popular import CONFIGS, remember_shape

from rotationzoo.capacity.plan import (
    Wish,
    capacity_json,
    judge_wish,
    measure_capacity,
    parse_card,
    remarks,
)
from rotationzoo.capacity.shape import Storage
from rotationzoo.codec.formats import VLLM
from rotationzoo.errors import UsageError

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "name", "memory"),
    [
        ("24 gb", "24 gb", 24 * 10**9),
        ("79.6GiB", "79.6GiB", int(79.6 * GIB)),
        ("3090", "RTX 3090", int(23.56 * GIB)),
        ("5060ti", "RTX 5060 Ti", int(15.47 * GIB)),
        ("A100-80GB", "A100 80GB", int(79.15 * GIB)),
        ("NVIDIA L4", "L4", int(22.03 * GIB)),
        ("Tesla T4", "T4", int(14.56 * GIB)),
        ("RTX PRO 6000 Blackwell", "RTX PRO 6000", int(94.97 * GIB)),
        ("2x24GiB", "2 x 24GiB", 48 * GIB),
        ("8 x H200", "8 x H200", 8 * int(139.8 * GIB)),
        ("2x 2x 24GiB", "4 x 24GiB", 96 * GIB),
    ],
)
def test_names_and_sizes(text, name, memory):
    card = parse_card(text)
    assert (card.name, card.count * card.memory) == (name, memory)
    assert card.usable == int(0.92 * memory) - card.count * 1_380_000_000


@pytest.mark.parametrize("text", ["", "banana", "24", "0GiB", "-1GiB", "0x H100", "H101", "1e9GiB"])
def test_anything_else_is_refused(text):
    with pytest.raises(UsageError) as error:
        parse_card(text)
    assert "24GiB" in error.value.hint


@pytest.fixture
def measure(tmp_path, monkeypatch):
    """The capacity of a popular model, from its config alone."""
    monkeypatch.setattr("rotationzoo.capacity.plan.read_shape", remember_shape)

    def measured(name, gpu, context=131072, requests=1, storage=None, **changes):
        (tmp_path / "config.json").write_text(json.dumps({**CONFIGS[name], **changes}))
        card = parse_card(gpu)
        return measure_capacity(Wish(str(tmp_path), context, requests, card, storage or Storage()))

    return measured


@pytest.mark.parametrize(
    ("name", "gpu", "says"),
    [
        ("Llama-3.3-70B", "RTX 3090", "39.8 GB of weights in 4 bits, and RTX 3090 has 21.9 GB"),
        ("Qwen2.5-7B", "RTX 3090", "a cache in fp8; at most 1 fit, and 5 in 2.25 bits"),
        ("Llama-3.3-70B", "2x RTX 3090", "--context 49728 fits with weights in 4 bits and a cache"),
        ("Llama-3.3-70B", "H100", "bits and a cache in fp8; at most 1 fit, and 5 in 2.25 bits"),
        ("Qwen3-8B", "24GiB", "as published and a cache in 2.25 bits; at most 1 fit"),
    ],
)
def test_can_i_run_128k(measure, name, gpu, says):
    capacity = measure(name, gpu, storage=Storage(VLLM))
    answer = judge_wish(capacity)
    assert says in answer.words
    assert answer.words.startswith("Yes: " if answer.cache else "No: ")


def test_a_claim_that_cannot_be(measure):
    capacity = measure("Qwen3-4B", "H200", 100_000, 256, Storage(VLLM))
    answer = judge_wish(capacity)
    assert answer.cache is None
    assert answer.words == (
        "No: 256 requests of 100,000 tokens would take 546 GB of cache even in 2.25 bits, on top "
        "of 2.7 GB of weights in 4 bits, and H200 has 137 GB for both; --context 22336 fits with "
        "weights in 4 bits and a cache in 2.25 bits; 8 x H200 hold it with weights as published "
        "and a cache in 2.25 bits"
    )
    fitting = measure("Qwen3-4B", "H200", answer.context, 256, Storage(VLLM))
    assert judge_wish(fitting).cache == "int2"


@pytest.mark.parametrize(
    ("share", "cache", "tokens"),
    [
        (0.92, "bf16", 410_000),
        (0.9, "bf16", 398_464),
        (0.9, "fp8", 796_928),
        (0.9, "int2", 2_618_560),
    ],
)
def test_an_h100_held_as_many_tokens_in_vllm(measure, monkeypatch, share, cache, tokens):
    """What a server of 64 requests reported, at two shares of the memory (docs/plan.md)."""
    monkeypatch.setattr("rotationzoo.capacity.plan.UTILIZATION", share)
    capacity = measure("Qwen3-8B", "H100", storage=Storage(VLLM))
    each = capacity.longest("published", cache, capacity.wish.card, 64)
    # That server of 2 bits had one matrix of a head more than today's.
    assert 64 * each == pytest.approx(tokens, rel=2e-3)


def test_latents_have_every_cache(measure):
    report = capacity_json(measure("DeepSeek-V3", "8x H200"))
    bytes_of_int2 = report["kv_bytes_per_token"]["int2"]
    assert report["bits_per_element"] == bytes_of_int2 * 8 / (61 * 576)
    assert report["max_requests"]["int2"] > report["max_requests"]["fp8"] > 1


@pytest.mark.parametrize(
    ("positions", "context"), [(4096, 4096), (131_072, 131_072), (163_840, 131_072), (0, 131_072)]
)
def test_tokens_of_a_request_by_default(measure, positions, context):
    changes = {"max_position_embeddings": positions, "num_hidden_layers": 1}
    capacity = measure("Qwen3-8B", "H100", None, **changes)
    assert capacity_json(capacity)["context"] == context


def test_cards_that_cannot_share_the_heads(measure):
    capacity = measure("Qwen3-8B", "3x24GiB", storage=Storage(VLLM))
    assert "KV heads over 3 GPUs" in " ".join(remarks(capacity))


def test_cards_that_cannot_serve_our_cache(measure):
    other = measure("Qwen3-4B", "T4")
    assert "our kernels do not run on T4" in " ".join(remarks(other))
    most = capacity_json(other)["max_context"]
    assert most["int2"] == 0 < most["fp8"]
