"""Masks of long rows, made in blocks: models and simulations compute what they compute with whole
masks."""

import pytest
import torch
from support import architectures
from support.float64 import CLOSE, all_in_float64, to_float64

from rotationzoo.artifact.fit import fit
from rotationzoo.codec.rotated import RotatedCodec
from rotationzoo.codec.windows import CacheLayout
from rotationzoo.model import long_masks
from rotationzoo.model.capture import Attention, capture
from rotationzoo.model.geometry import geometry_of
from rotationzoo.model.long_masks import LongMask, NeedsWholeMask
from rotationzoo.model.prediction import run_decoder
from rotationzoo.recipe.loading import PRESETS
from rotationzoo.simulation.simulated import Simulation

MASKED = ["phi3", "gemma2", "gemma3", "gemma4", "gpt_oss", "mimo_v2_flash", "llama4", "gemma3-vlm"]
"""Families with sliding windows, chunks or eager attention, whose masks are made whole."""
IDS = torch.randint(3, 60, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def short(monkeypatch):
    """Switches to masks in blocks of 7 queries, and counts the blocks that are made."""
    made = []
    rows = LongMask.rows

    def count(mask, queries):
        made.append(queries)
        return rows(mask, queries)

    def switch():
        monkeypatch.setattr(long_masks, "LARGEST_MASK", 10)
        monkeypatch.setattr(long_masks, "BLOCK_QUERIES", 7)
        monkeypatch.setattr(LongMask, "rows", count)
        return made

    return switch


@architectures.families(MASKED)
def test_a_model_computes_the_same_with_masks_in_blocks(name, short):
    model = architectures.build(name)
    with torch.no_grad():
        whole = run_decoder(model, IDS).logits(slice(None))
        made = short()
        seen = []
        # Two hooks: each sees whole rows.
        note = lambda layer, query, key, *_: seen.append((query.shape[2], key.shape[2]))  # noqa: E731
        with capture(model, note), capture(model, note):
            blocks = run_decoder(model, IDS).logits(slice(None))
    assert made
    assert set(seen) == {(24, 24)}
    # 3e-5 was measured, of logits of up to 16.
    torch.testing.assert_close(blocks, whole, rtol=0, atol=2e-4)


@architectures.families(["llama", "gemma2", "gemma3", "gpt_oss"])
@all_in_float64()
def test_a_simulation_computes_the_same_with_masks_in_blocks(name, short, monkeypatch):
    model = architectures.build(name, torch.float64)
    geometry = geometry_of(model, IDS[:1])
    arm = RotatedCodec(to_float64(fit(None, PRESETS["hadamard"], geometry)))
    layers = {layer.index for layer in geometry}
    simulation = Simulation(arm, CacheLayout(sink=2, recent=4), geometry, layers)

    def run():
        with torch.no_grad(), simulation.running(model):
            return run_decoder(model, IDS).logits(slice(None))

    whole = run()
    made = short()
    blocks = run()
    assert bool(made) == (name != "llama")
    assert (blocks - whole).abs().max() <= CLOSE * whole.abs().max()


def test_a_model_that_computes_with_its_mask_is_refused(short):
    """Doge does so in some versions of transformers, and not in others."""
    model = architectures.build("doge")
    with torch.no_grad():
        whole = run_decoder(model, IDS).logits(slice(None))
        short()
        refusal = ""
        try:
            blocks = run_decoder(model, IDS).logits(slice(None))
        except NeedsWholeMask as error:
            refusal = str(error)
    if refusal:
        assert "needs its attention mask whole (its dtype)" in refusal
    else:
        torch.testing.assert_close(blocks, whole, rtol=0, atol=2e-4)


def test_attention_over_other_keys_than_the_masks_is_refused():
    options = {"batch_size": 1, "q_length": 8, "kv_length": 8, "mask_function": lambda *_: True}
    attend = Attention(torch.nn.Module(), lambda *_: None, LongMask(None, options, "cpu"), {})
    with pytest.raises(NeedsWholeMask, match="shape in Module"):
        attend(torch.zeros(1, 4, 8, 16), torch.zeros(1, 4, 12, 16), torch.zeros(1, 4, 12, 16))
    assert not hasattr(attend.mask, "dtype")


def test_other_errors_of_a_model_are_raised_unchanged(short):
    model = architectures.build("gemma2")
    model.model.layers[1].register_forward_pre_hook(lambda *_: object().nothing)
    short()
    with pytest.raises(AttributeError, match="nothing"):
        run_decoder(model, IDS)
