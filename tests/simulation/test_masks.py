"""The mask over both copies of a cache: which layers share one, and that its blocks hide nothing
that it shows."""

import pytest
import torch
from support import architectures

from rotationzoo.codec.layout import CacheLayout
from rotationzoo.model import long_masks
from rotationzoo.model.capture import Attention
from rotationzoo.simulation import masks
from rotationzoo.simulation.masks import TwoCopyMask, TwoCopyMasks


@pytest.fixture
def asked(monkeypatch):
    """The question which mask a layer gets, and the masks that layers share."""
    model = architectures.build("llama")
    shared = TwoCopyMasks(CacheLayout(sink=1, recent=2))

    def ask(mask, length=8, device="cpu"):
        query = torch.zeros(1, 4, length, 16, device=device)
        return shared.mask_for(Attention(model, lambda *_: None, mask, {}), query)

    return ask, shared


def test_layers_on_a_second_device_get_a_mask_of_their_own(asked):
    """Under sdpa every layer of full attention is handed None, wherever it is and however long the
    row."""
    ask, _ = asked
    first, second = ask(None), ask(None, device="meta")
    assert ask(None) is first
    assert ask(None, device="meta") is second
    assert second is not first
    longer = ask(None, length=9)
    rows = [mask.rows(slice(None)) for mask in (first, second, longer)]
    assert [row.shape[-2:] for row in rows] == [(8, 16), (8, 16), (9, 18)]
    assert [row.device.type for row in rows] == ["cpu", "meta", "cpu"]


def test_masks_of_other_rows_are_forgotten(asked):
    """Prompts of many lengths would leave a mask behind for each of them."""
    ask, shared = asked
    made = [ask(None, length=length) for length in (8, 9, 9, 8)]
    assert made[1] is made[2]
    assert made[3] is not made[0]
    assert shared._masks == [made[3]]


def test_layers_that_are_handed_copies_of_one_mask_share_what_is_made_of_it(asked):
    """accelerate gives each layer that is not on the first device a copy of its own."""
    ask, _ = asked
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
    window = mask & ~torch.ones_like(mask).tril(-3)
    whole, narrow = ask(mask), ask(window)
    assert ask(mask.clone()) is whole
    assert ask(window.clone()) is narrow
    assert not torch.equal(whole.rows(slice(None)), narrow.rows(slice(None)))


@pytest.mark.parametrize("additive", [False, True], ids=["boolean", "additive"])
@pytest.mark.parametrize("kept", [0, 400, 1e9], ids=["none kept", "some kept", "all kept"])
def test_blocks_together_are_the_whole_mask(monkeypatch, additive, kept):
    monkeypatch.setattr(long_masks, "BLOCK_QUERIES", 7)
    monkeypatch.setattr(masks, "KEPT_BYTES", kept)
    causal = torch.ones(1, 1, 24, 24, dtype=torch.bool).tril()
    mask = masks.as_additive(causal, torch.float32) if additive else causal
    attend = Attention(torch.nn.Module(), lambda *_: None, mask, {})
    cache = CacheLayout(sink=2, recent=5)
    exact = cache.exact_for(torch.arange(24), 24)
    whole = masks._both_copies(mask, exact)
    visible = whole > torch.finfo(whole.dtype).min if additive else whole
    assert torch.equal(visible.sum(-1), causal.sum(-1)), "one copy of each position that is seen"
    two_copies = TwoCopyMask(attend, cache, torch.device("cpu"), 24)
    for _ in range(2):  # the second time, of blocks that were kept
        rebuilt = torch.full_like(whole, torch.finfo(whole.dtype).min if additive else False)
        blocks = list(two_copies.blocks())
        for block in blocks:
            rebuilt[:, :, block.queries, block.seen] = block.mask
        assert torch.equal(rebuilt, whole)
    assert len(blocks) == 4
    assert len(blocks[0].seen) < 24
    assert (len(two_copies._kept) == 4) == (kept == 1e9)
    positions = torch.tensor([3, 11, 23])
    assert torch.equal(two_copies.rows(positions), whole[:, :, positions])
