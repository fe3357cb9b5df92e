"""What the benchmarks share: their options, the device's clock and memory, and jobs in turns."""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Job = Callable[[], object]


def make_parser(description: str) -> argparse.ArgumentParser:
    """A parser whose help begins with the docstring of a script."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def require_gpu() -> None:
    if DEVICE != "cuda":
        sys.exit("this benchmark needs an NVIDIA GPU")


def describe_error(error: Exception) -> str:
    """The error's type and the first line of what it says, which is long in some libraries."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def free_memory() -> None:
    """Give everything back that nobody holds."""
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def synchronized_time() -> float:
    """The time when the device has done what it was asked to."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds_of(job: Job) -> float:
    """How long a job takes, until the device is done with it."""
    started = synchronized_time()
    job()
    return synchronized_time() - started


def interleave(jobs: Mapping[str, Job], repeats: int) -> dict[str, list[float]]:
    """The seconds of each job. The jobs take turns, forwards and backwards, so that a device that
    gets warmer is as warm for each of them. A first, untimed turn pays for what is set up once."""
    for job in jobs.values():
        job()
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(repeats):
        names = list(jobs)[:: 1 if turn % 2 == 0 else -1]
        for name in names:
            times[name].append(seconds_of(jobs[name]))
    return times


def compare(jobs: Mapping[str, Job], repeats: int, unit: str) -> None:
    """Run the jobs in turns, and print the median of each over that of the first."""
    times = interleave(jobs, repeats)
    base = statistics.median(next(iter(times.values())))
    for name, seconds in times.items():
        spread = ", ".join(f"{second:.2f}" for second in seconds)
        print(f"{name:12s} {statistics.median(seconds) / base:5.2f} x {unit}   ({spread} s)")
