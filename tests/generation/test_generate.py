"""What `generate` does with a 2-bit cache: greedy text, beams, padding, candidates, copies."""

import copy

import pytest
import torch
from support import architectures, caches
from support.caches import random_arm
from support.cases import quick_first
from support.float64 import CLOSE
from support.hybrids import save_hybrid
from support.naive_cache import naive_cache

from rotationzoo.codec.windows import CacheLayout
from rotationzoo.errors import RotationZooError

PROMPT = torch.randint(5, 60, (1, 18), generator=torch.Generator().manual_seed(3))
WINDOWS = CacheLayout(sink=2, recent=5)
# Full attention, sliding windows, layers that share a cache, layers with linear attention, latents.
EVERY_KIND = "llama", "gemma3", "gemma4", "qwen3_5", "deepseek_v3"
FAMILIES = [name for name in EVERY_KIND if architectures.available(name)]


NEW = 8  # tokens, with which another block of 8 is begun


def empty(model, **settings):
    return caches.cache_for(model, random_arm(model), WINDOWS, **settings)


def generate(model, cache, ids=PROMPT, **options):
    return caches.generate(model, cache, ids, NEW, **options)


@torch.no_grad()
def search_beams(model, ids, beams):
    """The likeliest continuations that a beam search finds by forward passes over whole rows."""
    scores = torch.zeros(1)
    for _ in range(NEW):
        logits = model(input_ids=ids, use_cache=False).logits[:, -1].log_softmax(-1)
        if (end := model.generation_config.eos_token_id) is not None:
            logits[:, end] = -torch.inf
        scores, best = (scores[:, None] + logits).flatten().topk(beams)
        ids = torch.cat([ids[best // logits.shape[1]], best[:, None] % logits.shape[1]], dim=1)
    return ids


# Pages are read by layers without a window, where models have such layers.
READINGS = quick_first(
    [*((name, "auto") for name in FAMILIES), ("llama", "pages"), ("gemma2", "pages")], 6
)


@pytest.mark.parametrize(("name", "reading"), READINGS)
def test_beams_are_those_of_the_simulation(name, reading):
    model = architectures.build(name, torch.float64)
    # As long as the exact windows, so that the prompt reads itself exact in the simulation too.
    short = PROMPT[:, :7]
    cache = empty(model, reading=reading)
    beams = generate(model, cache, short, num_beams=3, num_return_sequences=3)
    with caches.simulation_of(model, random_arm(model), WINDOWS).running(model):
        expected = search_beams(model, short, 3)
    assert torch.equal(beams, expected)


@pytest.mark.parametrize(("name", "reading"), READINGS)
@pytest.mark.parametrize("chunk", quick_first([None, 4]))
def test_a_padded_batch_is_read_row_by_row(name, reading, chunk):
    model = architectures.build(name, torch.float64)
    # All of the last row fits into its exact windows at first.
    rows = [PROMPT, PROMPT[:, 5:], PROMPT[:, 13:]]
    batch = torch.cat([torch.nn.functional.pad(row, (18 - row.shape[1], 0)) for row in rows])
    mask = (torch.arange(18) >= torch.tensor([[0], [5], [13]])).long()
    free = [empty(model, reading=reading) for _ in range(4)]
    options = {"prefill_chunk_size": chunk}
    together = generate(model, free.pop(), batch, attention_mask=mask, **options)
    for row, text in zip(rows, together, strict=True):
        # Rows that are not padded fall into other chunks, and read other tokens exact.
        if chunk is None or row.shape[1] == 18:
            alone = generate(model, free.pop(), row, **options)
            assert torch.equal(text[18:], alone[0, row.shape[1] :])


@pytest.mark.parametrize("reading", ["rows", "pages"])
@pytest.mark.parametrize("helper", ["lookup", "model"])
def test_candidates_are_read_as_by_a_reference_with_the_same_rule(helper, reading):
    model = architectures.build("llama", torch.float64)
    options = {"prompt_lookup_num_tokens": 3}
    if helper == "model":
        assistant = copy.deepcopy(model)
        with torch.no_grad():  # often right, and often wrong
            assistant.lm_head.weight += 0.1 * torch.randn(
                assistant.lm_head.weight.shape, generator=torch.Generator().manual_seed(4)
            )
        options = {"assistant_model": assistant}
    reference = naive_cache(random_arm(model), WINDOWS)
    cache = empty(model, slack=24, reading=reading)
    assert torch.equal(generate(model, cache, **options), generate(model, reference, **options))
    assert cache.get_seq_length() == reference.get_seq_length()


def test_one_cache_serves_request_after_request():
    model = architectures.build("llama", torch.float64)
    cache = empty(model)
    first = generate(model, cache)
    cache.reset()
    assert cache.bytes_held == cache.get_seq_length() == 0
    assert torch.equal(generate(model, cache), first)
    cache.reset()
    batch, mask = PROMPT.repeat(2, 1), (torch.arange(18) >= torch.tensor([[0], [6]])).long()
    together = generate(model, cache, batch, attention_mask=mask)
    cache.reset()
    alone = generate(model, cache, PROMPT[:, 6:])
    assert torch.equal(together[:1], first), "another batch, and other padding"
    assert torch.equal(together[1, 18:], alone[0, 12:])
    cache.reset()
    assert torch.equal(generate(model, cache), first)
    # A second turn reads the first through the codec, and need not be given again.
    turn = torch.cat([first, PROMPT[:, :4]], dim=1)
    assert generate(model, cache, turn).shape[1] == turn.shape[1] + NEW
    assert cache.get_seq_length() == turn.shape[1] + NEW - 1


@torch.no_grad()
def prefix_of(model):
    cache = empty(model)
    model(input_ids=PROMPT[:, :-1], past_key_values=cache)
    return cache


@pytest.mark.parametrize("name", [*FAMILIES, "lfm2"])
def test_a_copied_prefix_goes_on_as_the_cache_itself(name):
    model = architectures.build(name, torch.float64)
    cache = prefix_of(model)
    copied = copy.deepcopy(cache)
    assert copied.bytes_held == cache.bytes_held > 0
    assert copied.get_seq_length() == 17
    text = generate(model, copied)
    assert cache.get_seq_length() == 17
    assert torch.equal(generate(model, cache), text)


@torch.no_grad()
def test_two_kinds_of_attention_in_one_layer(tmp_path):
    model = save_hybrid("falcon_h1", tmp_path)
    read, cache = PROMPT[:, :1], empty(model)
    logits = caches.read_in_calls(model, cache, PROMPT, 1)
    expected = caches.simulate(model, random_arm(model), WINDOWS, PROMPT)
    assert caches.distance(logits, expected) <= CLOSE
    exact = caches.read_whole(model, PROMPT)
    assert (logits - exact)[:, -1].abs().max() > 1e-3
    copied = copy.deepcopy(cache)
    for each in (cache, copied):
        each.reorder_cache(torch.tensor([0, 0]))
    both = [model(input_ids=read.repeat(2, 1), past_key_values=each) for each in (cache, copied)]
    assert torch.equal(both[0].logits, both[1].logits)
    cache.reset()
    again = model(input_ids=PROMPT[:, :1], past_key_values=cache).logits
    assert torch.equal(again, logits[:, :1])


def test_a_copied_prefix_serves_a_batch():
    model = architectures.build("llama", torch.float64)
    cache = prefix_of(model)
    copied = copy.deepcopy(cache)
    with pytest.raises(RotationZooError, match="holds 1 row of a batch, and a call brings 2"):
        generate(model, copied, PROMPT.repeat(2, 1))
    copied.batch_repeat_interleave(2)
    text = generate(model, cache)
    assert torch.equal(generate(model, copied, PROMPT.repeat(2, 1)), text.repeat(2, 1))
