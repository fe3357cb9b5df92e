"""What the benchmark of pages counts."""

from benchmark_pages import Shape, bound_of


def test_bytes_are_those_of_the_published_table():
    shape = Shape(1, 102_400)
    assert shape.bytes == 102_400 * 4096
    assert bound_of(shape, "sglang") == 102_080 * 640 + 320 * 4096
    assert bound_of(shape, "vllm") == 102_080 * 576 + 320 * 4096
    assert bound_of(Shape(8, 102_400), "fine") == 8 * (102_080 * 640 + 320 * 4096)
