"""What the benchmarks and checks of decoding rest on: their reference, their caches and the step
of a whole model."""

from dataclasses import replace

import pytest
import torch
from benchmark_decode import SHAPES, Row, fastest, table
from decode_arms import exact_arms as list_exact_arms
from decode_arms import exact_error, first_request, packed_variants
from decode_caches import LAYOUTS, Shape, Storage, exact_caches, packed_caches
from decode_case_list import PURPOSES, quick
from decode_cases import Drawing
from decode_reference import error_of, reference
from decode_timing import Timing
from step_caches import FLUSHED, ExactLayer, PackedLayers
from step_model import Geometry, Model
from step_products import OneRequest
from support.devices import on_gpu
from transformers import Qwen3Config, Qwen3ForCausalLM

from rotationzoo.codec import cuda, int2
from rotationzoo.codec.attention import attend

SHAPE = Shape(batch=2, context=200, heads=4, kv_heads=2, dim=32)
STORAGE = Storage("sglang", page=64, sink=8, recent=64)


def every_case():
    return [case for cases in PURPOSES.values() for case in cases()]


def test_the_definition_passes_the_check_of_the_kernel():
    for case in quick():
        inputs = Drawing(case, "cpu").inputs()
        error = error_of(attend(*inputs.arguments()), reference(inputs))
        # Measured: 1.7e-3 with outputs in bfloat16, 2e-6 of it not from rounding them.
        assert error.row < 2e-3
        assert error.beyond < 1e-4


def test_a_wrong_output_fails_the_check():
    case = next(iter(quick()))
    inputs = Drawing(case, "cpu").inputs()
    output, expected = attend(*inputs.arguments()), reference(inputs)
    worse = output.clone()
    worse[1, 3, 1] *= 1.01
    assert error_of(worse, expected).head > 4e-3
    worse[1, 3, 1, 0] = torch.nan
    assert error_of(worse, expected).row == torch.inf


def test_cases_cover_what_they_should():
    cases = every_case()
    assert {case.dim for case in cases} >= {64, 80, 96, 112, 128, 160, 192, 256}
    assert {case.format for case in cases} == set(LAYOUTS)
    assert {case.group for case in cases} >= {1, 2, 4, 5, 7, 8, 12, 16}
    assert {case.new for case in cases} == {1, 2, 3, 4}
    assert any(0 in case.lengths for case in cases)


@pytest.mark.parametrize("place", ["first", "last", "head", "tail"])
def test_a_peak_outweighs_all_other_tokens(place):
    case = replace(next(iter(quick())), lengths=(300, 40, 33), new=1, peak=(place, 40.0))
    inputs = Drawing(case, "cpu").inputs()
    expected = reference(inputs)
    values = {
        "first": inputs.packed.value.restore()[:, :, 0],
        "last": torch.stack(
            [inputs.packed.value.restore()[row, :, n - 1] for row, n in enumerate(case.lengths)]
        ),
        "head": inputs.head.value[:, :, 0].float(),
        "tail": torch.stack(
            [inputs.tail.value[row, :, n - 1].float() for row, n in enumerate(case.tail)]
        ),
    }
    heads = values[place].double().repeat_interleave(case.group, 1)
    assert (expected[:, :, 0] - heads).norm() / heads.norm() < 1e-2


@pytest.mark.parametrize("format", LAYOUTS)
def test_random_caches_can_be_read(format):
    caches = packed_caches(SHAPE, replace(STORAGE, format=format), 2, "cpu")
    for side in (caches[1].packed.key, caches[1].packed.value):
        addresses = replace(side, table=None).addresses()
        assert torch.equal(side.addresses(), addresses)
        restored = side.restore()
        assert restored.std() == pytest.approx(1.7, abs=0.2)  # codes of 0 to 3, scales near 1.5
    query = torch.randn(2, 4, 1, 32)
    ((_, read),) = packed_variants(attend, SHAPE)
    output = read(query, caches[1])
    assert torch.equal(read(query[:1], first_request(caches[1])), output[:1])


def test_bytes_are_those_of_the_published_table():
    shapes = [Shape(*map(int, name.split("x"))) for name in SHAPES.split(",")]
    assert shapes[1].bytes == 102_400 * 4096
    assert Storage("sglang").token_bytes(8, 128) == 640
    assert Storage("vllm").token_bytes(8, 128) == 576
    assert Storage("sglang").bytes(shapes[1]) == 102_080 * 640 + 320 * 4096


def test_every_order_of_a_cache_in_memory_gives_its_own_attention():
    memory, query = exact_caches(SHAPE, 1, "cpu")[0], torch.randn(2, 4, 1, 32).bfloat16()
    for arm in list_exact_arms(SHAPE, None, ()):
        if arm.name == "sdpa flash":
            both = [arm.view(side, SHAPE) for side in memory]
            assert exact_error(arm.read(query, *both), query, *both) < 1e-2


def test_the_table_compares_with_the_fastest_exact_kernel():
    times = {"a": 4e-6, "b": 2e-6, "c": 1e-6}
    rows = [
        Row("1 x 2", name, 2 if name == "c" else 16, "", 8_000, 0.0, Timing(t, t, t, True))
        for name, t in times.items()
    ]
    rows.append(replace(rows[0], timing=Timing(3e-6, 3e-6, 3e-6, True)))
    lines = table(fastest(rows), {"copy": 1e10, "read": 2e10}).splitlines()
    assert lines[2:] == [
        "| 1 x 2 | a | 3.0 | 0.27 | 0.13 | 0.67 | 0e+00 |  |",
        "| 1 x 2 | b | 2.0 | 0.40 | 0.20 | 1.00 | 0e+00 |  |",
        "| 1 x 2 | c | 1.0 | 0.80 | 0.40 | 2.00 | 0e+00 |  |",
    ]


def quantize(rows, clip, format):
    stored = int2.quantize(rows, clip, None, format)
    metadata = torch.stack([stored.scale, stored.offset], -1)
    return cuda.Packed(int2.pack(stored.codes, format.packing), metadata, format)


def test_a_flush_moves_tokens_from_the_tail_to_the_pages():
    caches = PackedLayers(SHAPE, 2, attend, STORAGE, "cpu")
    length, before = caches.length // FLUSHED * FLUSHED, caches.tails.clone()
    counts = caches.packed.clone(), caches.filled.clone()
    caches.flush(quantize)
    assert torch.equal(caches.tails[..., : STORAGE.recent, :], before[..., FLUSHED:, :])
    for layer, tail in zip(caches.layers, before, strict=True):
        packed = layer.cache.packed
        for side, rows in zip((packed.key, packed.value), tail, strict=True):
            restored = side.restore()[:, :, length : length + FLUSHED]
            error = (restored - rows[:, :, :FLUSHED].float()).norm() / rows[:, :, :FLUSHED].norm()
            assert error < 0.45  # of normal rows in 2 bits
    caches.undo()
    assert (torch.equal(caches.packed, counts[0]), torch.equal(caches.filled, counts[1])) == (1, 1)


@torch.no_grad()
def test_a_step_is_a_step_of_the_model():
    """Token by token against transformers' Qwen3 with the same weights."""
    geometry = Geometry(2, 64, 96, 4, 2, 32, 61)
    config = Qwen3Config(
        vocab_size=61, hidden_size=64, intermediate_size=96, num_hidden_layers=2, head_dim=32,
        num_attention_heads=4, num_key_value_heads=2, rope_theta=1e6, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    ours, theirs = Model(geometry, "cpu", fuse=False), Qwen3ForCausalLM(config).bfloat16().eval()
    for weight in theirs.parameters():
        weight.data *= 10 if weight.ndim > 1 else 1  # so that every part of a layer matters
    copy_weights(ours, theirs)
    shape = Shape(1, 1, 4, 2, 32)
    ids, arm = torch.randint(61, (1, 12)), next(iter(list_exact_arms(shape, None, ())))
    memory = torch.zeros(2, 2, 1, 2, 12, 32, dtype=torch.bfloat16)  # layers, sides
    expected = theirs(ids).logits[0].float()
    for place in range(12):
        position = torch.tensor([place])
        layers = [ExactLayer(part[..., : place + 1, :], position, arm) for part in memory]
        token = ours.logits(ids[:, place], position, layers).argmax(-1)
        # bfloat16 may change the order of the two most probable tokens.
        assert expected[place].max() - expected[place, token] < 0.05


def copy_weights(ours, theirs):
    ours.embedding, ours.head = theirs.model.embed_tokens.weight, theirs.lm_head.weight
    for layer, source in zip(ours.layers, theirs.model.layers, strict=True):
        attention, mlp = source.self_attn, source.mlp
        layer.qkv = torch.cat([getattr(attention, f"{name}_proj").weight for name in "qkv"])
        layer.out, layer.down = attention.o_proj.weight, mlp.down_proj.weight
        layer.gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])


@on_gpu
@torch.inference_mode()
def test_the_kernels_for_one_request_compute_the_step(device):
    """Against float32, in which plain torch in bfloat16 is off by more."""
    geometry = Geometry(2, 512, 1536, 8, 2, 128, 1024)
    torch.manual_seed(0)
    model = Model(geometry, device, fuse=False)
    exact = Model(geometry, device, fuse=False)
    for wide, layer in zip(exact.layers, model.layers, strict=True):
        vars(wide).update({name: weight.float() for name, weight in vars(layer).items()})
    for name in ("embedding", "norm", "head"):
        setattr(exact, name, getattr(model, name).float())
    tokens, position = torch.tensor([5], device=device), torch.tensor([7], device=device)
    caches = [OwnValues(geometry, device) for _ in model.layers]
    logits = OneRequest(model).logits(tokens, position, caches)
    expected = exact.logits(tokens, position, [OwnValues(geometry, device) for _ in model.layers])
    assert (logits - expected).norm() < 0.01 * expected.norm()
    written = caches[0].both[:, :, :, 3]
    assert written.count_nonzero() == written.numel()
    assert caches[0].both.count_nonzero() == written.numel()


class OwnValues:
    """A cache whose attention returns the query, so that rounding of queries shows."""

    def __init__(self, geometry, device):
        size = 2, 1, geometry.kv_heads, 8, geometry.dim
        self.both = torch.zeros(size, dtype=torch.bfloat16, device=device)
        self.position = torch.tensor([3], device=device)

    def write(self, rows):
        self.both.index_copy_(3, self.position, rows.to(self.both))

    def attend(self, query):
        return query
