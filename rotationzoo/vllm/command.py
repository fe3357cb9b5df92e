"""The command that starts a server, and how vLLM reads its options before anything starts."""

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
"""vLLM's default on a large GPU, 1,024, would take 54 GiB of exact copies for an 8B model. A later
option of the same name replaces this one."""
WRITTEN = ("model", "model_tag", "revision", "worker_cls", "additional_config")
"""The options that `serve` writes, and that no later option may replace."""


def server_command(package: str, model: str, has_windows: bool) -> list[str]:
    """The words that start a server with this package of vLLM. `has_windows`: whether layers of the
    model have a sliding window."""
    # The config names our worker, so that it runs even where no plugin is loaded.
    worker = ["--worker-cls", WORKER]
    if package == GPU_PACKAGE:
        command = ["vllm"]
        if shutil.which("vllm") is None:
            command = [sys.executable, "-m", CLI]
        # Each request takes exact copies, besides the memory that vLLM plans.
        backend = FULL_ATTENTION if has_windows else EVERY_LAYER
        return [*command, "serve", model, *backend, *FEWER_REQUESTS, *worker]
    # The command `vllm` of the package for CPUs fails: it looks for the other package.
    return [sys.executable, "-m", CPU_SERVER, "--model", model, *worker]


def read_command(command: list[str], more: list[str]) -> Any:
    """The `VllmConfig` that vLLM makes of a command of `server_command` and `more` options, without
    starting anything. Raises as `read_options`, and for what vLLM refuses."""
    from rotationzoo.vllm.upstream import UsageContext

    os.environ.setdefault(FOLDER, "")
    engine = read_options(command, more)
    with as_unavailable("vLLM refuses its options", hint="compare them with vLLM's own --help"):
        return engine.create_engine_config(UsageContext.OPENAI_API_SERVER)


def read_options(command: list[str], more: list[str]) -> Any:
    """The `AsyncEngineArgs` of a command, which vLLM has not yet compared with the model. Raises
    `RotationZooError` for options that vLLM does not have, and for those that replace `WRITTEN`."""
    with as_unavailable("this vLLM lacks the parser of its options", hint=OTHER_VERSION):
        from rotationzoo.vllm.upstream import AsyncEngineArgs, FlexibleArgumentParser
        from rotationzoo.vllm.upstream import make_arg_parser as make_parser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            raise ValueError(message)

    start = next(at for at, word in enumerate(command, 1) if word in (CPU_SERVER, "serve"))
    with as_unavailable("vLLM refuses its options", hint="compare them with vLLM's own --help"):
        parser = make_parser(Parser())
        ours, given = (parser.parse_args(command[start:] + words) for words in ([], more))
        for name in WRITTEN:
            if getattr(given, name) != getattr(ours, name):
                problem = f"vLLM's options name another {name}, which this command writes"
                hint = "leave it out, or start vllm serve yourself"
                raise RotationZooError(problem, hint)
        given.model = given.model_tag or given.model  # as `vllm serve` does
        return AsyncEngineArgs.from_cli_args(given)
