"""Keeping the logs and progress bars of other libraries out of a command's output."""

import logging
import os
import sys

from rotationzoo.cli.output import visible
from rotationzoo.network.tokens import redact

_LOUD = ("accelerate", "huggingface_hub", "bitsandbytes", "sigstore", "tuf", "vllm")


class _Visible(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return visible(redact(super().format(record)))


SHELL: dict[str, str] = {}
"""The variables as they were before, for a server that takes the command's place."""


def hush_libraries() -> None:
    """Silence the logs and bars of other libraries: a command shows its own progress and errors.
    Those that are imported later read variables, and transformers the hub's setting of bars."""
    from huggingface_hub.utils import disable_progress_bars

    SHELL.clear()
    SHELL.update(os.environ)
    _log_to_stderr()
    disable_progress_bars()
    for name in _LOUD:
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.setdefault("DATASETS_VERBOSITY", "critical")
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "VLLM_LOGGING_LEVEL": "CRITICAL"}
    if imported := sys.modules.get("transformers.utils.logging"):
        imported.set_verbosity_error()
        imported.disable_progress_bar()


def _log_to_stderr() -> None:
    """Send rotationzoo's own warnings to the stderr of this command only.

    They must not reach the root logger, to which ModelScope's client adds a handler with another
    stream.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Visible())
    logger = logging.getLogger("rotationzoo")
    logger.handlers, logger.propagate = [handler], False
