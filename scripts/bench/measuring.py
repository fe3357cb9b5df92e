"""What the benchmarks share: their options, and the device's name and clock."""

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


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
    """The error's type and the first line of its message."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def seconds_of(job: Callable[[], Any]) -> float:
    """How long a job takes on the device."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    job()
    torch.cuda.synchronize()
    return time.perf_counter() - started
