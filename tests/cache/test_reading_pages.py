"""Decoding steps that read pages of a 2-bit cache against those that read restored rows."""

import copy
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from support import architectures, caches
from support.caches import distance, random_arm, with_means, with_transforms
from support.cases import quick_first
from support.codec import gpu
from support.float64 import CLOSE, all_in_float64
from support.memory import allocated
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rotationzoo.artifact.fit import fit
from rotationzoo.cache import stream as stream_module
from rotationzoo.cache.layer import Padding, RotatedLayer
from rotationzoo.cache.paged_attention import LazyRows, MaskCheck, PageReader
from rotationzoo.cache.stream import READ_TOGETHER, Reach, Stream
from rotationzoo.codec import attention, cuda_attention
from rotationzoo.codec.attention import Scores
from rotationzoo.codec.formats import FORMATS, SGLANG, SIMULATED
from rotationzoo.codec.rotated import RotatedCodec
from rotationzoo.codec.settings import CacheSettings
from rotationzoo.codec.windows import CacheLayout
from rotationzoo.geometry import Layer
from rotationzoo.model.capture import capture
from rotationzoo.model.geometry import geometry_of
from rotationzoo.recipe.loading import PRESETS

WINDOWS = CacheLayout(sink=2, recent=5)
IDS = torch.randint(5, 60, (2, 22), generator=torch.Generator().manual_seed(1))
PROMPT = IDS[:1, :18]


def empty(model, reading, arm=None, windows=WINDOWS):
    # With so small blocks, tables of addresses grow more than once.
    return caches.cache_for(model, arm or random_arm(model), windows, reading=reading, block=4)


@pytest.fixture
def reads(monkeypatch):
    """How often steps read quantized tokens as rows, and how often as pages."""
    counts = Counter()
    read, packed = Stream.read, Stream.packed

    def count_rows(self, start=0):
        counts["rows"] += bool(self.head)
        return read(self, start)

    def count_pages(self):
        counts["pages"] += 1
        return packed(self)

    monkeypatch.setattr(Stream, "read", count_rows)
    monkeypatch.setattr(Stream, "packed", count_pages)
    return counts


def decode(model, cache, ids=IDS):
    """Logits of the tokens, which are read one by one after a short prompt."""
    return caches.read_in_calls(model, cache, ids, [4, *[1] * (ids.shape[1] - 4)])


# How many layers read pages, how the model is built, and the codec. 15 of 22 tokens read pages.
EAGER = {"attn_implementation": "eager"}
FAMILIES = [
    ("llama", 4, {}, "transform"),
    ("gpt_oss", 1, EAGER, "sglang"),
    ("gemma4", 2, {}, "sglang"),
    ("deepseek_v3", 0, {}, "sglang"),  # no kernel reads latents
    *(("llama", 4, {}, codec) for codec in ("sglang", "vllm", "groups")),
    ("llama", 4, EAGER, "sglang"),
    ("phi3", 0, {}, "sglang"),  # sliding windows alone
    ("qwen3", 4, {"num_key_value_heads": 1}, "sglang"),
    ("gemma2", 2, EAGER, "sglang"),
    ("qwen3_next", 1, {}, "sglang"),
    ("doge", 0, {}, "sglang"),  # computes its masks from the values
]


@pytest.mark.parametrize(("name", "layers", "changes", "codec"), quick_first(FAMILIES, 4))
def test_pages_are_read_as_rows_are(name, layers, changes, codec, reads):
    if not architectures.available(name):
        pytest.skip("not in this transformers")
    model = architectures.build(name, torch.float64, **changes)
    rotations = random_arm(model).rotations
    windows = replace(WINDOWS, format=FORMATS.get(codec, SGLANG))
    arm = RotatedCodec(rotations, group_size=4 if codec == "groups" else None)
    if codec == "transform":
        arm = RotatedCodec(with_transforms(with_means(rotations)), rounding="transform")
    rows = decode(model, empty(model, "rows", arm, windows))
    assert not reads["pages"]
    steps = reads.pop("rows")
    pages = decode(model, empty(model, "pages", arm, windows))
    assert reads["pages"] == 15 * layers
    assert reads["rows"] == steps - 15 * {"gemma4": 1}.get(name, layers), "one shares its cache"
    assert distance(pages, rows) <= CLOSE
    assert distance(rows, caches.read_whole(model, IDS)) > 0.01


def generate(model, cache, ids=PROMPT, **options):
    return caches.generate(model, cache, ids, 8, **options)


def test_a_cropped_and_a_copied_cache_go_on(reads):
    model, read = architectures.build("llama", torch.float64), []
    for reading in ("rows", "pages"):
        cache = empty(model, reading)
        decode(model, cache, PROMPT)
        cache.crop(-3)
        copied = copy.deepcopy(cache)
        read.append(decode(model, cache, PROMPT[:, :8]))
        assert torch.equal(decode(model, copied, PROMPT[:, :8]), read[-1])
    assert distance(*read) <= CLOSE
    assert reads["pages"] == 4 * (11 + 2 * 4)


LEAST = torch.finfo(torch.float64).min
VISIBLE = torch.ones(22, 22, dtype=torch.bool).tril()
HOLE = VISIBLE & ~((torch.arange(22)[:, None] >= 18) & (torch.arange(22) == 3))
MASKS = {
    # What each call is given, and the lengths at which something is quantized and nothing hidden.
    "padding": (torch.ones_like(IDS).index_fill_(1, torch.tensor([9]), 0), [8, 9]),
    "boolean": (HOLE, range(8, 19)),
    "additive": (torch.zeros(22, 22).double().masked_fill(~HOLE, LEAST), range(8, 19)),
    "biased": (torch.arange(22.0).double().expand(22, 22).masked_fill(~VISIBLE, LEAST), []),
}


@pytest.mark.parametrize("name", quick_first(MASKS, 2))
@torch.no_grad()
def test_what_a_mask_hides_is_not_read(name, reads):
    model, (mask, plain) = architectures.build("llama", torch.float64), MASKS[name]
    caches = empty(model, "rows"), empty(model, "pages")
    lengths = []
    for start, end in [(0, 4), *((end - 1, end) for end in range(5, 23))]:
        shown = mask[:, :end] if name == "padding" else mask[None, None, start:end, :end]
        rows, pages = (
            model(input_ids=IDS[:, start:end], attention_mask=shown, past_key_values=cache).logits
            for cache in caches
        )
        assert distance(pages, rows) <= CLOSE
        lengths += [end] * (reads.pop("pages", 0) == 4)
    assert lengths == [*plain]


def test_attention_weights_captures_and_gradients_need_rows(reads):
    model = architectures.build("llama", torch.float64, attn_implementation="eager")
    cache, seen, token = empty(model, "pages"), [], IDS[:1, :1]
    generate(model, cache)
    before = reads["pages"]
    with torch.no_grad():
        output = model(input_ids=token, past_key_values=cache, output_attentions=True)
        assert output.attentions[0].shape[-1] == cache.get_seq_length()
        with capture(model, lambda layer, query, key, *_: seen.append(key.shape[2])):
            model(input_ids=token, past_key_values=cache)
    assert seen == [cache.get_seq_length()] * 4
    model(input_ids=token, past_key_values=cache).logits.sum().backward()
    assert reads["pages"] == before > 0


@pytest.mark.parametrize("implementation", quick_first(["sdpa", "eager"]))
def test_other_caches_of_the_model_do_not_notice(implementation):
    model = architectures.build("llama", torch.float64, attn_implementation=implementation)
    plain = generate(model, DynamicCache(config=model.config))
    names = set(ALL_ATTENTION_FUNCTIONS)
    cache = empty(model, "pages")
    generate(model, cache)
    assert set(ALL_ATTENTION_FUNCTIONS) == names, "eager is not among them"
    assert torch.equal(generate(model, DynamicCache(config=model.config)), plain)
    with pytest.raises(IndexError), torch.no_grad():
        model(input_ids=torch.tensor([[10**6]]), past_key_values=cache)
    assert set(ALL_ATTENTION_FUNCTIONS) == names, "after an error"
    assert not cache.page_reading.readers
    hooks = model._forward_pre_hooks
    empty(copy.deepcopy(model), "pages")
    empty(model, "pages")
    assert len(hooks) == 2, "hooks are installed once"


def test_an_attention_function_that_is_registered_later_is_the_model_s(monkeypatch, reads):
    model, calls = architectures.build("llama", torch.float64), []
    generate(model, empty(model, "pages"))
    before, cache = reads["pages"], empty(model, "pages")

    def attend(*arguments, **options):
        calls.append(arguments)
        return sdpa_attention_forward(*arguments, **options)

    monkeypatch.setitem(type(ALL_ATTENTION_FUNCTIONS)._global_mapping, "sdpa", attend)
    generate(model, cache)
    assert len(calls) == 4 * 8
    assert reads["pages"] == before > 0


def test_models_run_side_by_side():
    """In threads that share the registry of attention functions."""
    models = [architectures.build("llama", torch.float64, seed=seed) for seed in range(2)]
    expected = [generate(model, empty(model, "rows")) for model in models]
    caches = [empty(model, "pages") for model in models]

    def write(model, cache):
        with all_in_float64():  # of this thread
            return generate(model, cache)

    with ThreadPoolExecutor(2) as threads:
        texts = [*threads.map(write, models, caches)]
    assert [*map(torch.equal, texts, expected)] == [True] * 2


@torch.no_grad()
def test_flash_attention_hides_later_tokens_without_a_mask(reads):
    """What it is called with for candidates; others get a mask then."""
    model = architectures.build("llama", torch.float64)
    cache = empty(model, "pages")
    generate(model, cache)
    layer, module = cache.layers[0], model.model.layers[0].self_attn
    layer.activate_past_recording()
    torch.manual_seed(1)
    token, query = (torch.randn(1, heads, 3, 16, dtype=torch.float64) for heads in (2, 4))
    step = layer.update(token, token, masks=MaskCheck())[0].step
    lazy = [LazyRows(step, side, token) for side in (0, 1)]
    flash = PageReader(ALL_ATTENTION_FUNCTIONS, "flash_attention_2")
    read = flash(module, query, *lazy, None, scaling=0.25)[0]
    assert not step.is_restored
    mask = torch.ones(3, step.columns, dtype=torch.bool).tril(step.columns - 3)[None, None]
    expected = sdpa_attention_forward(module, query, *lazy, mask, scaling=0.25)[0]
    assert distance(read, expected) <= CLOSE


# ---- few blocks are restored at a time


@torch.no_grad()
def test_a_long_context_takes_little_beside_its_rows():
    """Measured: 5.5 blocks of float32 rows beside both sides, and 44 with eight blocks together."""
    heads, dim, block, recent = 2, 32, 128, 8
    rotations = fit(None, PRESETS["random"], [Layer(0, 0, heads, heads, dim, dim)])
    layout = CacheLayout(SGLANG, sink=4, recent=recent)
    rows = torch.randn(1, heads, 100 * block, dim).bfloat16()
    stream = Stream(CacheSettings(RotatedCodec(rotations), layout, block=block), 0, rows, rows)
    stream.update(rows, rows, Reach(0, 0), Reach(100 * block - recent, 0), None)
    most, _, read = allocated(stream.read)
    beside = (most - sum(each.nbytes for each in read)) / (4 * heads * block * dim)
    assert 0 < beside <= 3 * READ_TOGETHER["value"]


# ---- on a GPU


def test_a_kernel_is_taken_where_there_is_one(monkeypatch):
    """With the definition in its place."""
    model, calls = architectures.build("llama"), []

    def attend(*arguments):
        calls.append(arguments)
        return attention.attend(*arguments)

    arm = RotatedCodec(fit(None, PRESETS["random"], geometry_of(model)))
    empties = [
        caches.cache_for(model, arm, WINDOWS, reading=reading, block=32)
        for reading in ("auto", "auto", "rows")
    ]
    rows = decode(model, empties[0])
    assert not calls, "there is none on a CPU"
    monkeypatch.setattr(cuda_attention, "attend", attend)
    monkeypatch.setattr(stream_module, "kernels_run_on", lambda device: True)
    pages = decode(model, empties[1])
    assert len(calls) == 4 * 15
    assert torch.equal(decode(model, empties[2]), rows)
    assert len(calls) == 4 * 15
    # Measured: 1.3e-6.
    assert (pages - rows).abs().max() <= 2e-5 * rows.abs().max()


def layer_on(device, format):
    """A layer of 200 tokens, of which 164 are quantized, and a token and its query."""
    rotations = with_transforms(fit(None, PRESETS["random"], [Layer(0, 0, 8, 2, 128, 128)]))
    rounding = "transform" if format == "segments" else "nearest"
    arm = RotatedCodec(rotations, rounding=rounding)
    windows = CacheLayout(SIMULATED[format], sink=4, recent=32)
    layer = RotatedLayer(CacheSettings(arm, windows), 0, Padding())
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(1, 2, 201, 128, generator=generator).to(device, torch.bfloat16)
    query = torch.randn(1, 8, 1, 128, generator=generator).to(device, torch.bfloat16)
    layer.update(rows[:, :, :200], rows[:, :, :200])
    return layer, rows[:, :, 200:], query


def take_step(layer, token):
    keys, _ = layer.update(token, token, masks=MaskCheck())
    assert isinstance(keys, LazyRows)
    return keys.step


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu)])
@pytest.mark.parametrize("format", ["sglang", "vllm", "segments"])
@torch.no_grad()
def test_a_step_reads_the_same_on_a_gpu(format, device):
    layer, token, query = layer_on(device, format)
    step = take_step(layer, token)
    output = step.attend(query, Scores(0.1)).float()
    (stream,) = layer.streams
    head, tail = stream.windows()
    expected = attention.attend(query.float(), stream.packed(), head, tail, Scores(0.1))
    assert (output - expected).norm() <= 5e-3 * expected.norm(), "in bfloat16"
    rows = scaled_dot_product_attention(query, *step.rows, scale=0.1, enable_gqa=True)
    assert (output - rows).norm() <= 2e-2 * expected.norm(), "rows are bfloat16 too"


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu)])
@pytest.mark.parametrize("format", ["sglang", "segments"])
@torch.no_grad()
def test_a_decoding_step_waits_for_nothing(format, device):
    layer, token, query = layer_on(device, format)
    take_step(layer, token).attend(query, Scores(0.1))  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(40):  # until the second block begins
            output = take_step(layer, token).attend(query, Scores(0.1))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert output.isfinite().all()
