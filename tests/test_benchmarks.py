"""What the benchmark of pages counts."""

from benchmark_pages import Shape, bound_of, settings_of


def test_bytes_are_those_of_the_published_table():
    shape = Shape(1, 102_400)
    assert shape.bytes == 102_400 * 4096
    sglang, vllm = (settings_of(shape, format, device="cpu") for format in ("sglang", "vllm"))
    assert bound_of(shape, sglang) == 102_080 * 640 + 320 * 4096
    assert bound_of(shape, vllm) == 102_080 * 576 + 320 * 4096
    channels = settings_of(shape, "segments", 2.25, device="cpu")
    assert 102_080 * 575 < bound_of(shape, channels) - 320 * 4096 <= 102_080 * 576
