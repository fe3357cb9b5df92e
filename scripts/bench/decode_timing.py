"""Times of launches on a GPU with a cold cache, and the bandwidth to compare them with."""

import itertools
import statistics
from collections.abc import Callable, Sequence

import torch
from measuring import describe_error

Launch = Callable[[], object]

COLD = 32
"""Caches are read in turn until this many times the L2 cache has been read, so that at most 3 % of
what a launch reads can still be in it. Overwriting the L2 cache between launches instead would
leave it full of lines that the next launch has to write back."""
_SHORTEST = 2e-3  # seconds of a replay; shorter ones would be timed with the gaps between them
_REPLAYS = 9, 200


def copies_of(size: int) -> int:
    """How many caches of `size` bytes to read in turn."""
    cold = COLD * torch.cuda.get_device_properties(0).L2_cache_size
    return max(1, -(-cold // size))


def measure(launches: Sequence[Launch], seconds: float = 0.15) -> float:
    """The seconds of a launch: the median of replays of launches that follow each other, the first
    again after the last, for about `seconds`.

    They are captured in one CUDA graph, so that what the CPU does for a launch does not count.
    Where that fails, a line says so, and it may count.
    """
    for launch in (launches[0], launches[-1], launches[0]):
        launch()  # compiles and tunes
    once = _elapsed(lambda: _run(launches), 1)[0]
    count = max(1, int(_SHORTEST / once) + 1) if once < _SHORTEST else 1
    replay = _replay([*launches] * count)
    once = _elapsed(replay, 2)[-1]
    least, most = _REPLAYS
    times = _elapsed(replay, min(most, max(least, int(seconds / once))))
    return statistics.median(times) / len(launches) / count


def _run(launches: Sequence[Launch]) -> None:
    for launch in launches:
        launch()


def _replay(launches: Sequence[Launch]) -> Launch:
    """What runs all launches: a graph, if there can be one."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            _run(launches)
    except Exception as error:  # of whichever library launches
        print(f"not captured in a graph: {describe_error(error)}", flush=True)
        torch.cuda.synchronize()
        return lambda: _run(launches)
    return graph.replay


def _elapsed(work: Launch, repeats: int) -> list[float]:
    """Seconds of each repetition. Nothing waits for the GPU before the last is launched."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1000 for start, end in itertools.pairwise(events)]


def bandwidth(size: int = 2 << 30) -> float:
    """Bytes per second of the fastest of torch's reductions that read `size` bytes and write next
    to nothing."""
    source = torch.randn(size // 4, device="cuda")
    rows = source.view(-1, 1 << 16)
    half = source.view(torch.bfloat16).view(-1, 1 << 16)
    reductions = (
        source.sum, source.amax, lambda: rows.sum(1), lambda: rows.amax(1), lambda: half.amax(1),
    )  # fmt: skip
    return max(size / measure([reduction]) for reduction in reductions)
