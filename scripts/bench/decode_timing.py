"""Times of launches on a GPU with a cold cache, and the bandwidth to compare them with."""

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Launch = Callable[[], object]

COLD = 32
"""Caches are read in turn until this many times the L2 cache has been read, so that at most 3 % of
what a launch reads can still be in it. Overwriting the L2 cache between launches instead would
leave it full of lines that the next launch has to write back."""
_SHORTEST = 2e-3  # seconds of a replay; shorter ones would be timed with the gaps between them
_REPLAYS = 9, 200


@dataclass(frozen=True)
class Timing:
    """Seconds of one launch: median, fastest and slowest replay."""

    median: float
    fastest: float
    slowest: float
    graph: bool
    """Whether a CUDA graph was replayed. Otherwise launches followed each other, and CPU time may
    count."""

    @property
    def microseconds(self) -> float:
        return 1e6 * self.median


def copies_of(size: int) -> int:
    """How many caches of `size` bytes to read in turn."""
    cold = COLD * torch.cuda.get_device_properties(0).L2_cache_size
    return max(1, -(-cold // size))


def measure(launches: Sequence[Launch], seconds: float = 0.15) -> Timing:
    """Time launches that follow each other, the first again after the last, for about `seconds`.

    They are captured in one CUDA graph, so that what the CPU does for a launch does not count.
    """
    for launch in (launches[0], launches[-1], launches[0]):
        launch()  # compiles and tunes
    once = _elapsed(lambda: _run(launches), 1)[0]
    count = max(1, int(_SHORTEST / once) + 1) if once < _SHORTEST else 1
    replay, graph = _replay([*launches] * count)
    once = _elapsed(replay, 2)[-1]
    least, most = _REPLAYS
    times = _elapsed(replay, min(most, max(least, int(seconds / once))))
    each = [time / len(launches) / count for time in times]
    return Timing(statistics.median(each), min(each), max(each), graph)


def _run(launches: Sequence[Launch]) -> None:
    for launch in launches:
        launch()


def _replay(launches: Sequence[Launch]) -> tuple[Launch, bool]:
    """What runs all launches, and whether it is a graph."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            _run(launches)
    except Exception as error:  # of whichever library launches
        print(f"not captured in a graph: {(str(error).splitlines() or [''])[0]}", flush=True)
        torch.cuda.synchronize()
        return lambda: _run(launches), False
    return graph.replay, True


def _elapsed(work: Launch, repeats: int) -> list[float]:
    """Seconds of each repetition. Nothing waits for the GPU before the last is launched."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1000 for start, end in itertools.pairwise(events)]


def bandwidths(size: int = 2 << 30) -> dict[str, float]:
    """Bytes per second of a copy by a kernel, read and written ones counted, and of the fastest of
    torch's reductions that read `size` bytes and write next to nothing."""
    source, target = torch.randn(2, size // 4, device="cuda")
    # In a CUDA graph, `copy_` becomes a memory copy, which is slower than a kernel.
    copy = 2 * size / measure([lambda: torch.neg(source, out=target)]).median
    rows = source.view(-1, 1 << 16)
    half = source.view(torch.bfloat16).view(-1, 1 << 16)
    reductions = (
        source.sum, source.amax, lambda: rows.sum(1), lambda: rows.amax(1), lambda: half.amax(1),
    )  # fmt: skip
    read = max(size / measure([reduction]).median for reduction in reductions)
    return {"copy": copy, "read": read}
