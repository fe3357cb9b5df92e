"""Decoding steps on tensors of a fixed place, against those of an ordinary cache."""

import copy
from contextlib import nullcontext
from dataclasses import dataclass, replace

import pytest
import torch
from support import architectures
from support.float64 import CLOSE, to_float64

from rotationzoo.cache import decoding_graph, fixed_layer
from rotationzoo.cache.arm import Arm
from rotationzoo.cache.decoding_graph import DecodingGraph
from rotationzoo.cache.kivi import KiviArm
from rotationzoo.cache.replayed_generation import replayed_steps
from rotationzoo.cache.rotated import RotatedCache
from rotationzoo.cache.settings import Storage
from rotationzoo.cache.windows import Cache
from rotationzoo.calibration.fit import fit
from rotationzoo.codec import attention, cuda_attention
from rotationzoo.errors import UnsupportedModel, UsageError
from rotationzoo.model.geometry import geometry_of
from rotationzoo.recipe import PRESETS

WINDOWS = Cache(sink=2, recent=5)
IDS = torch.randint(5, 60, (2, 40), generator=torch.Generator().manual_seed(1))


@dataclass(frozen=True)
class Grouped(Arm):
    """An arm that quantizes four tokens together, as a graph with room for four does."""

    @property
    def token_group(self):
        return 4


def rotations_of(model):
    return to_float64(fit(None, PRESETS["random"], geometry_of(model)))


def after_prompt(model, prompt, arm=None, windows=WINDOWS, **settings):
    """A cache that has read the first tokens."""
    arm = arm or Arm("", rotations_of(model))
    cache = RotatedCache(Storage(arm, windows, **{"block": 8, **settings}), model)
    with torch.no_grad():
        model(input_ids=IDS[:, :prompt], past_key_values=cache)
    return cache


@torch.no_grad()
def decode(model, cache, tokens):
    """The logits after each of these tokens."""
    logits = []
    for token in tokens:
        logits.append(
            model(input_ids=IDS[:, token : token + 1], past_key_values=cache).logits[:, -1]
        )
    return torch.stack(logits)


def step_through(model, cache, tokens, room):
    with DecodingGraph(model, cache, room) as step:
        return torch.stack([step(IDS[:, token : token + 1]) for token in tokens])


def distance(logits, expected):
    return ((logits - expected).abs().max() / expected.abs().max()).item()


# A prompt of 3 fits into the windows.
@pytest.mark.parametrize(
    ("name", "attention", "prompt"),
    [("llama", "sdpa", 3), ("qwen3", "eager", 20), ("glm4_moe", "sdpa", 20)],
)
def test_steps_compute_what_the_model_does(name, attention, prompt):
    model = architectures.build(name, torch.float64, attn_implementation=attention)
    tokens = range(prompt, 32)
    expected = decode(model, after_prompt(model, prompt), tokens)
    logits = step_through(model, after_prompt(model, prompt), tokens, room=1)
    assert distance(logits, expected) <= CLOSE


def test_tokens_that_wait_are_read_exact():
    """An ordinary cache that quantizes four tokens together has the same exact windows."""
    model = architectures.build("llama", torch.float64)
    arm = Grouped("", rotations_of(model))
    prompt, tokens = 23, range(23, 40)  # ends with a group
    expected = decode(model, after_prompt(model, prompt, arm), tokens)
    logits = step_through(model, after_prompt(model, prompt), tokens, room=4)
    assert distance(logits, expected) <= CLOSE
    single = step_through(model, after_prompt(model, prompt), tokens, room=1)
    assert distance(single, expected) > 1e-3


def changed(rotations):
    """Rotations with means, of keys that get their codes by error feedback."""
    generator = torch.Generator().manual_seed(3)

    def change(_, side, rotation):
        heads, dim = len(rotation.clip), rotation.dim
        mean = torch.randn(heads, dim, generator=generator)
        upper = torch.randn(heads, dim, dim, generator=generator).triu(1) / 4
        return replace(
            rotation, mean=mean, feedback=upper + torch.eye(dim) if side == "key" else None
        )

    return rotations.replace(change)


@pytest.mark.parametrize("codec", ["feedback", "kivi"])
def test_codecs(codec):
    model = architectures.build("llama", torch.float64)
    arm = KiviArm("", rotations_of(model), tokens=4, channels=8)
    if codec == "feedback":
        arm = Arm("", changed(rotations_of(model)), rounding="feedback")
    tokens = range(16, 32)
    expected = decode(model, after_prompt(model, 16, arm), tokens)
    # Tokens of a group wait for its last one in both caches.
    logits = step_through(model, after_prompt(model, 16, arm), tokens, room=1)
    assert distance(logits, expected) <= CLOSE


@pytest.mark.parametrize("steps", [0, 1, 13])
@pytest.mark.parametrize("prompt", [3, 20])
@torch.no_grad()
def test_a_layer_stores_what_an_ordinary_one_does(prompt, steps):
    """The same codes in the same places, and the same windows."""
    model = architectures.build("llama", torch.float64)
    rows = torch.randn(2, 2, 2, 40, 16, generator=torch.Generator().manual_seed(2))
    layers = [after_prompt(model, 4).layers[0] for _ in range(2)]
    for layer in layers:
        layer.reset()
        layer.update(*rows[..., :prompt, :])
    counters = fixed_layer.Counters(2, torch.device("cpu"))
    fixed = fixed_layer.FixedLayer(layers[1], counters, 5, None)
    length = fixed.stream.exact_tokens
    counters.set(0, 0, length)
    for token in range(prompt, prompt + steps):
        layers[0].update(*rows[..., token : token + 1, :])
        if length >= fixed.limit:
            fixed.flush(length)
            length = fixed.stream.exact_tokens
            counters.set(0, 0, length)
        fixed.update(*rows[..., token : token + 1, :])
        counters.advance()
        length += 1
    fixed.close(length)
    fixed.tidy()
    for name, rows in layers[0].tensors():
        if "block" not in name:
            assert torch.equal(dict(layers[1].tensors())[name], rows), name
    # Tokens that are rotated together may differ in the last bit of a scale.
    for rows, expected in zip(layers[1].read(0), layers[0].read(0), strict=True):
        assert distance(rows, expected) <= 1e-6
    assert layers[0].columns == layers[1].columns == prompt + steps


def test_a_closed_cache_goes_on(tmp_path):
    model = architectures.build("llama", torch.float64)
    caches = [after_prompt(model, 20) for _ in range(2)]
    before, after = range(20, 31), range(31, 40)
    decode(model, caches[0], before)
    with DecodingGraph(model, caches[1], room=1) as step:
        for token in before:
            step(IDS[:, token : token + 1])
        with pytest.raises(UsageError, match="a DecodingGraph has the tokens of this cache"):
            decode(model, caches[1], after)
        uses = (
            caches[1].reset,
            lambda: caches[1].crop(-1),
            lambda: caches[1].save(tmp_path / "prefix"),
        )
        for use in uses:
            with pytest.raises(UsageError, match="a DecodingGraph has the tokens"):
                use()
        with pytest.raises(UsageError, match="a DecodingGraph has the tokens"):
            caches[1].reorder_cache(torch.tensor([1, 0]))
        assert caches[1].get_seq_length() == 31
        with pytest.raises(UsageError, match="another DecodingGraph has this cache"):
            DecodingGraph(model, caches[1])
    with pytest.raises(UsageError, match="these steps have ended"):
        step(IDS[:, :1])
    assert caches[0].get_seq_length() == caches[1].get_seq_length() == 31
    copied = copy.deepcopy(caches[1])
    expected = decode(model, caches[0], after)
    assert distance(decode(model, caches[1], after), expected) <= CLOSE
    assert distance(step_through(model, copied, after, room=1), expected) <= CLOSE


@pytest.mark.parametrize("modes", [(True, False), (False, True)])
def test_a_prompt_and_its_steps_may_run_in_different_modes(modes):
    """With flushes, which write into tensors of the prompt, and steps after the last one."""
    model = architectures.build("llama", torch.float64)
    prompt, steps = modes
    with torch.inference_mode(prompt):
        cache = after_prompt(model, 20)
    with torch.inference_mode(steps):
        logits = step_through(model, cache, range(20, 28), room=2)
    with torch.inference_mode(prompt):
        assert decode(model, cache, [28]).isfinite().all()
    assert logits.isfinite().all()


class Replayed:
    """What stands for a CUDA graph: it remembers where tables were, and writes where it wrote."""

    def __init__(self, step):
        self.step, self.tables = step, step._tables
        step._logits = step._run()
        step._set_counters()

    def replay(self):
        assert all(old is new for old, new in zip(self.tables, self.step._tables, strict=True))
        self.step._logits.copy_(self.step._run())


@pytest.fixture
def captured(monkeypatch):
    """The lengths of the tail at which a step was captured, where a CPU stands for a GPU."""
    lengths = []

    def capture(step):
        step._graph = Replayed(step)
        lengths.append(step._length)

    monkeypatch.setattr(DecodingGraph, "_capture", capture)
    monkeypatch.setattr(decoding_graph, "has_kernel", lambda stream, query: True)
    monkeypatch.setattr(cuda_attention, "attend", attention.attend)
    return lengths


def test_a_graph_is_captured_again_when_a_table_moves(captured):
    model = architectures.build("llama", torch.float64)
    tokens = range(16, 40)
    cache = after_prompt(model, 16, block=4)
    with DecodingGraph(model, cache, room=3, eager=True) as step:
        expected = torch.stack([step(IDS[:, token : token + 1]) for token in tokens])
    assert not captured
    logits = step_through(model, after_prompt(model, 16, block=4), tokens, room=3)
    assert torch.equal(logits, expected)
    # A table of 6 pages of 4 tokens, and one of 14.
    assert captured == [5, 4]


@pytest.mark.parametrize(("prompt", "samples"), [(3, True), (20, False)])
def test_generate_takes_these_steps(prompt, samples, captured):
    model = architectures.build("llama", torch.float64)
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": samples}
    options |= {"prefill_chunk_size": 8} if prompt > 8 else {}
    texts, lengths = [], []
    for _ in range(2):
        cache = RotatedCache(Storage(Arm("", rotations_of(model)), Cache(sink=2, recent=64)), model)
        torch.manual_seed(0)
        block = replayed_steps(model, cache) if texts else nullcontext()
        ids = IDS[:, :prompt]
        mask = torch.ones_like(ids)
        with block:
            texts.append(model.generate(ids, attention_mask=mask, past_key_values=cache, **options))
        lengths.append(cache.get_seq_length())
    assert torch.equal(*texts)
    assert lengths == [prompt + 11] * 2
    assert len(captured) == 1
    assert "forward" not in vars(model)


def test_generate_gets_more_than_a_step_computes(captured):
    """Tokens hidden by a mask, which a step would read, and hidden states."""
    model = architectures.build("llama", torch.float64)
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    mask = torch.ones_like(IDS[:, :20])
    hiding = mask.clone()
    hiding[1, 9:12] = 0
    for changes in ({"attention_mask": hiding}, {"output_hidden_states": True}):
        outputs = []
        for replays in (False, True):
            cache = after_prompt(model, 20)
            cache.reset()
            arguments = {"attention_mask": mask, "past_key_values": cache, **options, **changes}
            with replayed_steps(model, cache) if replays else nullcontext():
                outputs.append(model.generate(IDS[:, :20], **arguments))
        assert torch.equal(*[torch.stack(output.logits) for output in outputs])
        if "output_hidden_states" in changes:
            assert None not in outputs[1].hidden_states
    assert not captured


def test_generate_goes_on_without_a_graph(captured):
    """For a model with sliding windows."""
    model = architectures.build("phi3", torch.float64)
    cache, expected = after_prompt(model, 12), after_prompt(model, 12)
    with replayed_steps(model, cache):
        logits = decode(model, cache, range(12, 20))
    assert torch.equal(logits, decode(model, expected, range(12, 20)))
    assert not captured


def on_meta(model):
    model.lm_head.to("meta")


REFUSED = {
    "sliding": ("phi3", None, "RotatedSlidingLayer"),
    "linear": ("qwen3_next", None, "needs full attention in all layers"),
    "weights": ("llama", on_meta, "are on cpu, meta"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_are_refused(name):
    family, change, message = REFUSED[name]
    model = architectures.build(family, torch.float64)
    cache = after_prompt(model, 12)
    if change:
        change(model)
    with pytest.raises(UnsupportedModel, match=message):
        DecodingGraph(model, cache)
    assert not any(layer.lent for layer in cache.rotated_layers)


def test_a_model_that_reads_its_cache_otherwise_is_refused():
    model = architectures.build("doge", torch.float64)
    cache = after_prompt(model, 12)
    with (
        pytest.raises(UnsupportedModel, match="does more with keys and values"),
        DecodingGraph(model, cache) as step,
    ):
        step(IDS[:, :1])
    assert cache.get_seq_length() == 12
    assert decode(model, cache, [12]).isfinite().all()


def test_arguments_that_are_refused():
    model = architectures.build("llama", torch.float64)
    cache = after_prompt(model, 12)
    with pytest.raises(UsageError, match="no RotatedCache of this model"):
        DecodingGraph(architectures.build("llama", torch.float64), cache)
    with pytest.raises(UsageError, match="room must be a whole number"):
        DecodingGraph(model, cache, room=0)
    with pytest.raises(UsageError, match=r"one token of every row, \[2, 1\]"):
        DecodingGraph(model, cache)(IDS[:, :2])
    empty = RotatedCache(cache.storage, model)
    with pytest.raises(UsageError, match="the cache is empty"):
        DecodingGraph(model, empty)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :3] = 0
    with torch.no_grad():
        model(input_ids=IDS[:, :12], attention_mask=mask, past_key_values=empty)
    with pytest.raises(UsageError, match="begin with padding"):
        DecodingGraph(model, empty)
