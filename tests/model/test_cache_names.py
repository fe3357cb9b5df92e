"""A model's cache under the old name and under the new one."""

import logging
import warnings
from types import SimpleNamespace

import pytest
import torch
from support import architectures
from transformers import DynamicCache

from rotationzoo.model.cache_names import cache_argument, given_cache, returned_cache
from rotationzoo.model.prediction import continue_greedily
from rotationzoo.runtime.cache import RotatedCache


class Old:
    def forward(self, input_ids, past_key_values=None): ...


class New:
    def forward(self, input_ids, cache=None): ...


@pytest.mark.parametrize(("kind", "name"), [(Old, "past_key_values"), (New, "cache")])
def test_a_cache_has_the_name_that_the_model_gives_it(kind, name):
    cache = DynamicCache()
    assert cache_argument(kind(), cache) == {name: cache}
    assert given_cache({name: cache, "use_cache": True}) is cache
    assert returned_cache(SimpleNamespace(**{name: cache})) is cache


def test_a_call_may_have_no_cache():
    assert given_cache({"input_ids": 1}) is None
    assert returned_cache(SimpleNamespace(logits=1)) is None


@torch.no_grad()
def test_the_installed_transformers_finds_no_fault_with_the_names(caplog):
    model, ids = architectures.build("llama"), torch.arange(3, 9)[None]
    caches = [DynamicCache(config=model.config), RotatedCache(None, model)]
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        continue_greedily(model, ids, caches[0], 2)
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 2}
        model.generate(ids, **options, **caches[1].argument)
    assert "deprecated" not in caplog.text
    assert [cache.get_seq_length() for cache in caches] == [7, 7]
