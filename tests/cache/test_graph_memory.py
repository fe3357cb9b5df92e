"""Decoding steps on a device that runs out of memory: the cache gets its layers and tokens back."""

import pytest
import torch
from support import architectures

from rotationzoo.cache.arm import Arm
from rotationzoo.cache.blocks import Blocks
from rotationzoo.cache.decoding_graph import DecodingGraph
from rotationzoo.cache.rotated import RotatedCache
from rotationzoo.cache.rotated_layer import RotatedLayer
from rotationzoo.cache.settings import Storage
from rotationzoo.cache.windows import Cache
from rotationzoo.calibration.fit import fit
from rotationzoo.codec.attention import PackedSide
from rotationzoo.model.geometry import geometry_of
from rotationzoo.recipe import PRESETS

IDS = torch.randint(5, 60, (2, 40), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def after_prompt(model, prompt):
    """A cache that has read the first tokens."""
    arm = Arm("", fit(None, PRESETS["random"], geometry_of(model)))
    cache = RotatedCache(Storage(arm, Cache(sink=2, recent=5), block=8), model)
    model(input_ids=IDS[:, :prompt], past_key_values=cache)
    return cache


@torch.no_grad()
def decode(model, cache, tokens):
    """The logits after each of these tokens."""
    calls = [IDS[:, token : token + 1] for token in tokens]
    outputs = [model(input_ids=ids, past_key_values=cache).logits[:, -1] for ids in calls]
    return torch.stack(outputs)


def distance(logits, expected):
    return ((logits - expected).abs().max() / expected.abs().max()).item()


# While a layer is taken over, and when all of them are lent.
@pytest.mark.parametrize(("kind", "call"), [(Blocks, 2), (Blocks, 5), (PackedSide, 1)])
def test_a_graph_without_memory_leaves_the_cache_as_it_was(kind, call, monkeypatch):
    model, calls = architectures.build("llama"), []
    cache, expected = after_prompt(model, 12), after_prompt(model, 12)
    work = kind.addresses

    def run_out_of_memory(part):
        calls.append(part)
        if len(calls) == call:
            raise torch.OutOfMemoryError
        return work(part)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "addresses", run_out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            DecodingGraph(model, cache)
    assert len(calls) == call
    assert not any(layer.lent for layer in cache.rotated_layers)
    assert torch.equal(decode(model, cache, [12, 13]), decode(model, expected, [12, 13]))
    with DecodingGraph(model, cache, room=2) as step:
        assert step(IDS[:, 14:15]).isfinite().all()


@pytest.mark.parametrize("call", range(1, 5))
def test_memory_that_runs_out_in_a_flush(call, monkeypatch):
    """Some layers have quantized a token then, and others have not."""
    model, calls = architectures.build("llama"), []
    cache, append = after_prompt(model, 12), Blocks.append
    step = DecodingGraph(model, cache, room=1)
    step(IDS[:, 12:13])

    def run_out_of_memory(blocks, rows):
        append(blocks, rows)
        calls.append(rows)
        if len(calls) == call:
            raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Blocks, "append", run_out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            step(IDS[:, 13:14])
    step.close()
    expected = decode(model, after_prompt(model, 12), range(12, 20))
    assert distance(decode(model, cache, range(13, 20)), expected[1:]) <= 2e-5


def test_memory_that_runs_out_at_the_end_leaves_no_layer_lent(monkeypatch):
    model = architectures.build("llama")
    cache = after_prompt(model, 12)
    step = DecodingGraph(model, cache, room=1)
    step(IDS[:, 12:13])

    def run_out_of_memory(layer):
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(RotatedLayer, "trim", run_out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            step.close()
    step.close()
    assert cache.get_seq_length() == 13
    expected = decode(model, after_prompt(model, 12), [12, 13])
    assert distance(decode(model, cache, [13]), expected[1:]) <= 2e-5
