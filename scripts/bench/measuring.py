"""Shared by the benchmarks: their options, the device, and vLLM engines."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help begins with the docstring of a script."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def start_engine(model: str, stored: str, artifact: str | None, **options: Any) -> Any:
    """A vLLM in this process, whose cache is `bf16` (vLLM's own), `fp8`, or one of our formats,
    such as `segments`, or `segments:2.75` with a budget of bits."""
    # Then it is known when its work has ended.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    format, _, bits = stored.partition(":")
    if format == "fp8":
        options["kv_cache_dtype"] = "fp8"
    elif format != "bf16":
        config: dict[str, Any] = {"artifact": artifact, "format": format}
        config |= {"bits": float(bits)} if bits else {}
        options["additional_config"] = {"rotationzoo": config}
        options |= {"attention_backend": "CUSTOM"} if DEVICE == "cuda" else {}
    if DEVICE == "cuda":
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        options["compilation_config"] = graphs | options.get("compilation_config", {})
    return LLM(model, skip_tokenizer_init=True, disable_log_stats=True, **options)


def run_arms(arms: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Run this script for each arm in a process, and read its last line of JSON, or exit."""
    for arm in arms:
        command = [sys.executable, *sys.argv, "--arms", arm]
        done = subprocess.run(command, text=True, stdout=subprocess.PIPE)
        lines = [line for line in done.stdout.splitlines() if line.startswith(("[[", '{"'))]
        if done.returncode or not lines:
            sys.exit(f"the arm {arm} ended with {done.returncode}")
        print(arm, lines[-1], sep="\n", flush=True)
        yield arm, json.loads(lines[-1])
