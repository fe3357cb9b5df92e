"""The mask over both copies of a cache: which layers share one, and that its blocks hide nothing
that it shows."""

import pytest
import torch
from support import architectures

from rotationzoo.cache import masks
from rotationzoo.cache.masks import TwoCopyMasks, split_into_blocks, two_copy_mask
from rotationzoo.cache.windows import Cache
from rotationzoo.model.capture import Attention


@pytest.fixture
def asked(monkeypatch):
    """The question which mask a layer gets, and a list of the queries that a mask was really made
    for."""
    model = architectures.build("llama")
    shared = TwoCopyMasks(Cache(sink=1, recent=2))
    queries_seen = []

    def note(attend, query, cache, length):
        queries_seen.append(query)
        return two_copy_mask(attend, query, cache, length)

    monkeypatch.setattr(masks, "two_copy_mask", note)
    # No shapes are known of what depends on values, on `meta`.
    monkeypatch.setattr(masks, "split_into_blocks", lambda mask: [])

    def ask(mask, length=8, device="cpu"):
        query = torch.zeros(1, 4, length, 16, device=device)
        return shared.mask_for(Attention(model, lambda *_: None, mask, {}), query, length).whole

    return ask, queries_seen


def test_layers_on_a_second_device_get_a_mask_of_their_own(asked):
    """Under sdpa every layer of full attention is handed None, wherever it is and however long the
    row."""
    ask, queries_seen = asked
    first, second = ask(None), ask(None, device="meta")
    assert (first.device.type, second.device.type) == ("cpu", "meta")
    assert ask(None) is first
    assert ask(None, device="meta") is second
    longer = ask(None, length=9)
    assert (first.shape[-2:], longer.shape[-2:]) == ((8, 16), (9, 18))
    assert len(queries_seen) == 3


def test_masks_of_other_rows_are_forgotten(asked):
    """An answer that grows by tokens would leave a mask behind for each of them."""
    ask, queries_seen = asked
    for length in (8, 9, 9, 8):
        ask(None, length=length)
    assert len(queries_seen) == 3


def test_the_last_queries_see_what_they_see_among_all():
    """While it decodes, a model asks for the mask of one query over all keys."""
    model = architectures.build("llama")
    attend = Attention(model, lambda *_: None, None, {})
    cache = Cache(sink=1, recent=3)
    whole = two_copy_mask(attend, torch.zeros(1, 4, 9, 16), cache)
    last = two_copy_mask(attend, torch.zeros(1, 4, 2, 16), cache, length=9)
    assert torch.equal(last, whole[:, :, -2:])
    window = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril().triu(-4)
    attend = Attention(model, lambda *_: None, window, {})
    whole = two_copy_mask(attend, torch.zeros(1, 4, 9, 16), cache)
    attend = Attention(model, lambda *_: None, window[:, :, -1:], {})
    last = two_copy_mask(attend, torch.zeros(1, 4, 1, 16), cache, length=9)
    assert torch.equal(last, whole[:, :, -1:])


def test_layers_that_are_handed_copies_of_one_mask_share_what_is_made_of_it(asked):
    """accelerate gives each layer that is not on the first device a copy of its own."""
    ask, queries_seen = asked
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
    window = mask & ~torch.ones_like(mask).tril(-3)
    whole, narrow = ask(mask), ask(window)
    assert ask(mask.clone()) is whole
    assert ask(window.clone()) is narrow
    assert not torch.equal(whole, narrow)
    assert len(queries_seen) == 2


@pytest.mark.parametrize("additive", [False, True], ids=["boolean", "additive"])
def test_blocks_together_are_the_whole_mask(monkeypatch, additive):
    monkeypatch.setattr(masks, "BLOCK_QUERIES", 7)
    causal = torch.ones(1, 1, 24, 24, dtype=torch.bool).tril()
    mask = masks.as_additive(causal, torch.float32) if additive else causal
    attend = Attention(torch.nn.Module(), lambda *_: None, mask, {})
    whole = two_copy_mask(attend, torch.zeros(1, 4, 24, 16), Cache(sink=2, recent=5))
    visible = whole > torch.finfo(whole.dtype).min if additive else whole
    assert torch.equal(visible.sum(-1), causal.sum(-1)), "one copy of each position that is seen"
    rebuilt = torch.full_like(whole, torch.finfo(whole.dtype).min if additive else False)
    blocks = split_into_blocks(whole)
    for block in blocks:
        rebuilt[:, :, block.queries, block.seen] = block.mask
    assert torch.equal(rebuilt, whole)
    assert len(blocks) == 4
    assert len(blocks[0].seen) < 24
