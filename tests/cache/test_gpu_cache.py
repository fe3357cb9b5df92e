"""A 2-bit cache on a GPU: what its kernels store and read is what torch's operations do, and a
decoding step waits for nothing."""

import pytest
import torch
from support import architectures
from support.caches import cache_for, read_in_calls, with_factors
from support.codec import gpu
from torch.nn.functional import scaled_dot_product_attention

from rotationzoo.artifact.fit import fit
from rotationzoo.cache import stream as stream_module
from rotationzoo.cache.decoding_step import LazyRows, MaskCheck
from rotationzoo.cache.layer import Padding, RotatedLayer
from rotationzoo.codec import attention, cuda_attention
from rotationzoo.codec.attention import Scores
from rotationzoo.codec.formats import FINE, FORMATS, SGLANG
from rotationzoo.codec.layout import CacheLayout
from rotationzoo.codec.rotated import RotatedCodec
from rotationzoo.codec.settings import CacheSettings
from rotationzoo.geometry import Layer
from rotationzoo.model.geometry import geometry_of
from rotationzoo.recipe.loading import PRESETS

IDS = torch.randint(5, 60, (2, 40), generator=torch.Generator().manual_seed(1))


def decode(model, cache):
    return read_in_calls(model, cache, IDS, [20, *[1] * 20])


def test_a_kernel_is_taken_where_there_is_one(monkeypatch):
    """With the definition in its place."""
    model, calls = architectures.build("llama"), []

    def attend(*arguments):
        calls.append(arguments)
        return attention.attend(*arguments)

    arm = RotatedCodec(fit(None, PRESETS["random"], geometry_of(model)))
    caches = [
        cache_for(model, arm, CacheLayout(sink=4, recent=8), block=32, reading=reading)
        for reading in ("auto", "auto", "rows")
    ]
    rows = decode(model, caches[0])
    assert not calls, "there is none on a CPU"
    monkeypatch.setattr(cuda_attention, "attend", attend)
    monkeypatch.setattr(stream_module, "kernels_run_on", lambda device: True)
    pages = decode(model, caches[1])
    assert len(calls) == 4 * 20
    assert torch.equal(decode(model, caches[2]), rows)
    assert len(calls) == 4 * 20
    # Measured: 1.3e-6.
    assert (pages - rows).abs().max() <= 2e-5 * rows.abs().max()


@torch.no_grad()
def test_windows_lie_as_the_kernel_reads_them(monkeypatch):
    """They are not copied in each step, though models hand over transposed rows."""
    model = architectures.build("llama")
    arm = RotatedCodec(fit(None, PRESETS["random"], geometry_of(model)))
    cache = cache_for(model, arm, CacheLayout(sink=4, recent=8), block=256)
    decode(model, cache)
    stream = cache.layers[0].streams[0]
    for window in stream.windows():
        assert window.key.is_contiguous()
        assert window.value.is_contiguous()
    # Windows that are too long for the kernel are left to the definition.
    monkeypatch.setattr(stream_module, "kernels_run_on", lambda device: True)
    query = stream.tail["key"]
    assert stream.has_kernel(query)
    stream.tail = {
        side: rows[:, :, :1].expand(-1, -1, 40_000, -1) for side, rows in stream.tail.items()
    }
    assert not stream.has_kernel(query)


def layer_on(device, codec):
    """A layer of 200 tokens, of which 164 are quantized, and a token and its query."""
    rotations = with_factors(fit(None, PRESETS["random"], [Layer(0, 0, 8, 2, 128, 128)]))
    arm = RotatedCodec(
        rotations, rounding="feedback" if codec in ("feedback", "fine") else "nearest"
    )
    format = {"feedback": SGLANG, "fine": FINE}.get(codec) or FORMATS[codec]
    windows = CacheLayout(format, sink=4, recent=32)
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
@pytest.mark.parametrize("codec", ["sglang", "vllm", "mlx", "fine", "feedback"])
@torch.no_grad()
def test_a_step_reads_the_same_on_a_gpu(codec, device):
    layer, token, query = layer_on(device, codec)
    step = take_step(layer, token)
    output = step.attend(query, Scores(0.1)).float()
    (stream,) = layer.streams
    head, tail = stream.windows()
    expected = attention.attend(query.float(), stream.packed(), head, tail, Scores(0.1))
    assert (output - expected).norm() <= 5e-3 * expected.norm(), "in bfloat16"
    rows = scaled_dot_product_attention(query, *step.rows, scale=0.1, enable_gqa=True)
    assert (output - rows).norm() <= 2e-2 * expected.norm(), "rows are bfloat16 too"


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu)])
@pytest.mark.parametrize("codec", ["sglang", "fine", "feedback"])
@torch.no_grad()
def test_a_decoding_step_waits_for_nothing(codec, device):
    layer, token, query = layer_on(device, codec)
    take_step(layer, token).attend(query, Scores(0.1))  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(40):  # until the second block begins
            output = take_step(layer, token).attend(query, Scores(0.1))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert output.isfinite().all()
