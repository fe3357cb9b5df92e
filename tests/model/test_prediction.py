"""Predictions in blocks of positions, which are the model's own logits for every family, and the
name that a model gives its cache."""

import logging
import warnings

import pytest
import torch
import transformers
from support import architectures
from transformers import DynamicCache

from rotationzoo.cache.rotated import RotatedCache
from rotationzoo.model import prediction
from rotationzoo.model.prediction import continue_greedily, run_decoder


def assert_same_logits(model, monkeypatch):
    """Logits in blocks of 7 positions, and those of one row, are the model's own."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    monkeypatch.setattr(prediction, "BLOCK_LOGITS", 2 * 7 * vocabulary)
    ids = torch.randint(3, 60, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits
        states = run_decoder(model, ids)
        blocks = list(states.blocks(3, 23))
        row = states.row(1).logits(slice(5, 9))
    assert [at for at, _ in blocks] == [slice(3, 10), slice(10, 17), slice(17, 23)]
    # Equal bits were measured for all of them.
    torch.testing.assert_close(torch.cat([logits for _, logits in blocks], 1), whole[:, 3:23])
    torch.testing.assert_close(row, whole[1:, 5:9])


@architectures.families()
def test_blocks_hold_the_models_own_logits(name, monkeypatch):
    assert_same_logits(architectures.build(name), monkeypatch)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Gemma2", {"final_logit_softcapping": 2.0, "head_dim": 16}),
        ("Granite", {"logits_scaling": 3.0}),
        ("Cohere", {"logit_scale": 0.25}),
    ],
)
def test_heads_that_do_more_than_multiply_are_the_models_own(family, options, monkeypatch):
    config = getattr(transformers, f"{family}Config")(**architectures.BASE, **options)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    assert_same_logits(model, monkeypatch)


def test_positions_for_the_head_are_on_no_device():
    """The head of a model on several GPUs may be on another GPU than the ids."""
    model, given = architectures.build("llama"), []
    model.register_forward_pre_hook(lambda *call: given.append(call[2]), with_kwargs=True)
    with torch.no_grad():
        run_decoder(model, torch.arange(3, 13)[None])
    (options,) = given
    tensors = {name for name, value in options.items() if isinstance(value, torch.Tensor)}
    assert "logits_to_keep" in options
    assert tensors == {"input_ids"}


@torch.no_grad()
def test_transformers_does_not_warn_about_the_names(caplog):
    model, ids = architectures.build("llama"), torch.arange(3, 9)[None]
    caches = [DynamicCache(config=model.config), RotatedCache(None, model)]
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        continue_greedily(model, ids, caches[0], 2)
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 2}
        model.generate(ids, **options, **caches[1].argument)
    assert "deprecated" not in caplog.text
    assert [cache.get_seq_length() for cache in caches] == [7, 7]
