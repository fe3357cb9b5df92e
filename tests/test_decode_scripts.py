"""The benchmarks and checks of decoding rest on these: their reference and their caches."""

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
