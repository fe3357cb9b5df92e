"""The command that starts a server, and what vLLM makes of its options before anything starts."""

import os
import shutil
import sys
from typing import Any, NoReturn

from rotationzoo.errors import RotationZooError, as_unavailable
from rotationzoo.vllm import FOLDER, WORKER
from rotationzoo.vllm.plugin import GPU_PACKAGE, OTHER_VERSION
from rotationzoo.vllm.upstream import CLI, CPU_SERVER

EVERY_LAYER = ("--attention-backend", "CUSTOM")
FULL_ATTENTION = ("--attention-config.backend_per_kind.full_attention", "CUSTOM")
"""Layers with a sliding window keep the backend that vLLM chooses."""
FEWER_REQUESTS = ("--max-num-seqs", "64")
"""vLLM's own number on a large GPU, 1,024, would take 54 GiB of exact copies for a model of 8B. A
later option of the same name replaces this one."""
WRITTEN = ("model", "model_tag", "revision", "worker_cls", "additional_config")
"""What `serve` writes among vLLM's options, and no later option may replace."""


def server_command(package: str, model: str, has_windows: bool) -> list[str]:
    """The words that start a server with this package of vLLM. `has_windows`: whether layers of the
    model have a sliding window."""
    # The config itself names our code: it runs also where no plugin is loaded.
    worker = ["--worker-cls", WORKER]
    if package == GPU_PACKAGE:
        command = ["vllm"]
        if shutil.which("vllm") is None:
            command = [sys.executable, "-m", CLI]
        # As many requests as exact copies are kept for, besides the memory that vLLM plans.
        backend = FULL_ATTENTION if has_windows else EVERY_LAYER
        return [*command, "serve", model, *backend, *FEWER_REQUESTS, *worker]
    # The command `vllm` of the package for CPUs ends with an error: it looks for the other one.
    return [sys.executable, "-m", CPU_SERVER, "--model", model, *worker]


def read_command(command: list[str], more: list[str]) -> Any:
    """The `VllmConfig` of a command of `server_command` with more of vLLM's options, as vLLM itself
    reads them: nothing is started. Raises as `read_options`, and for what vLLM refuses."""
    from rotationzoo.vllm.upstream import UsageContext

    os.environ.setdefault(FOLDER, "")
    engine = read_options(command, more)
    with as_unavailable("vLLM refuses its options", hint="compare them with vLLM's own --help"):
        return engine.create_engine_config(UsageContext.OPENAI_API_SERVER)


def read_options(command: list[str], more: list[str]) -> Any:
    """The `AsyncEngineArgs` of a command, which vLLM has not compared with the model yet. Raises
    `RotationZooError` for options that vLLM does not have, and for those that replace what the
    command says."""
    with as_unavailable("this vLLM lacks what reads its options", hint=OTHER_VERSION):
        from rotationzoo.vllm.upstream import (
            AsyncEngineArgs,
            FlexibleArgumentParser,
            make_arg_parser,
        )

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            raise ValueError(message)

    start = next(at for at, word in enumerate(command, 1) if word in (CPU_SERVER, "serve"))
    with as_unavailable("vLLM refuses its options", hint="compare them with vLLM's own --help"):
        parser = make_arg_parser(Parser())
        ours, given = (parser.parse_args(command[start:] + words) for words in ([], more))
        for name in WRITTEN:
            if getattr(given, name) != getattr(ours, name):
                problem = f"vLLM's options name another {name}, which this command writes"
                hint = "leave it out, or start vllm serve yourself"
                raise RotationZooError(problem, hint)
        given.model = given.model_tag or given.model  # as `vllm serve` does
        return AsyncEngineArgs.from_cli_args(given)
