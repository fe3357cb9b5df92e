"""What the benchmarks share: their options, the device's clock and memory, and jobs in turns."""

import argparse
import gc
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Job = Callable[[], Any]


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help begins with the docstring of a script."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def require_gpu() -> None:
    if DEVICE != "cuda":
        sys.exit("this benchmark needs an NVIDIA GPU")


def describe_machine() -> dict[str, Any]:
    """What figures hold for."""
    return {
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
    }


def describe_error(error: Exception) -> str:
    """The error's type and the first line of what it says, which is long in some libraries."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def attempt(name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a part measured, or its error, so that the other parts still run."""
    free_memory()
    try:
        return measure()
    except Exception as error:
        print(f"{name} failed: {describe_error(error)}", file=sys.stderr, flush=True)
        return {"error": describe_error(error)}


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


def peak_of(job: Job) -> int:
    """The most bytes that were allocated on the device while a job ran; 0 on a CPU."""
    if DEVICE == "cpu":
        job()
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    job()
    return torch.cuda.max_memory_allocated()


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
