"""The bars and warnings of other libraries, kept out of a command's output."""

import logging
import sys
from typing import Any

from rotationzoo.cli.output import visible
from rotationzoo.network.tokens import redact

_LOUD = ("accelerate", "huggingface_hub", "datasets")


class _Visible(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return visible(redact(super().format(record)))


def hush_libraries() -> None:
    """Silence what other libraries say on the way: a command shows progress of its own."""
    import transformers

    _log_to_stderr()
    settings: Any = transformers.logging  # which has no types
    settings.set_verbosity_error()
    settings.disable_progress_bar()  # and the bars of huggingface_hub with it
    for name in _LOUD:
        logging.getLogger(name).setLevel(logging.ERROR)


def _log_to_stderr() -> None:
    """Send rotationzoo's own warnings to the stderr of this command, and not on to the root logger:
    ModelScope's client gives that a handler with another stream."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Visible())
    logger = logging.getLogger("rotationzoo")
    logger.handlers, logger.propagate = [handler], False
