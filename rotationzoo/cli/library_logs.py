"""Keeping the logs and progress bars of other libraries out of a command's output."""

import logging
import os
import sys
from typing import Any

from rotationzoo.cli.output import visible
from rotationzoo.network.tokens import redact

_LOUD = ("accelerate", "huggingface_hub", "bitsandbytes", "sigstore", "tuf", "vllm")


class _Visible(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return visible(redact(super().format(record)))


def hush_libraries(models: bool = True) -> None:
    """Silence the logs and bars of other libraries: a command shows its own progress and errors.
    `models`: whether it may load a model; one that never does need not wait for transformers."""
    from huggingface_hub.utils import disable_progress_bars

    _log_to_stderr()
    disable_progress_bars()
    for name in _LOUD:
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.setdefault("DATASETS_VERBOSITY", "critical")  # read when it is imported, later
    os.environ["VLLM_LOGGING_LEVEL"] = "CRITICAL"
    if models:
        import transformers

        settings: Any = transformers.logging  # it has no type annotations
        settings.set_verbosity_error()
        settings.disable_progress_bar()


def _log_to_stderr() -> None:
    """Send rotationzoo's own warnings to the stderr of this command only.

    They must not reach the root logger, to which ModelScope's client adds a handler with another
    stream.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Visible())
    logger = logging.getLogger("rotationzoo")
    logger.handlers, logger.propagate = [handler], False
