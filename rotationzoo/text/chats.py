"""Chats in the form of a tokenizer's template, which comes with the model and may
loop and multiply text: it runs in a process of its own, with limits of time and memory."""

import multiprocessing
import resource
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from rotationzoo.errors import RotationZooError, first_sentence

_SECONDS = 10.0  # a chat of 16 MiB took 0.1 s
_MEMORY = 1 << 30  # bytes more than the process has when it starts
_ADDED = 1 << 20  # characters that a template may add to the messages
# A fork has the tokenizer at once. Elsewhere it is not safe after torch was imported.
_METHOD = "fork" if sys.platform == "linux" else "spawn"


class ChatTemplate:
    """The chat template of a tokenizer. Its process starts with the first chat, and ends with this
    object."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        self._connection: Connection | None = None

    def render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """The text of a chat. `options` go to `apply_chat_template`.

        Raises `ValueError`, with a reason, where the template refuses the chat, and
        `RotationZooError` where it takes more time, memory or text than any template needs.
        """
        try:
            connection = self._connection = self._connection or self._start()
            connection.send((messages, options))
            answer = connection.recv_bytes() if connection.poll(_SECONDS) else b""
        except (EOFError, OSError):  # the process has ended, for want of memory
            answer = b""
        if not answer:
            self._connection = None
            self._process.kill()
            raise RotationZooError(
                f"the tokenizer's chat template was given up: a chat took more than {_SECONDS:g} s "
                f"or {_MEMORY >> 30} GiB, or became {_ADDED:,} characters longer",
                hint="do not use this template; plain text needs none",
            )
        text = answer[1:].decode(errors="surrogatepass")
        if answer[:1] == b"-":
            raise ValueError(text)
        return text

    def _start(self) -> Connection:
        context: Any = multiprocessing.get_context(_METHOD)
        ends: tuple[Connection, Connection] = context.Pipe()
        words = self.tokenizer, *ends
        self._process = context.Process(target=_serve, args=words, daemon=True)
        self._process.start()
        ends[1].close()
        return ends[0]


def _serve(tokenizer: PreTrainedTokenizerBase, other: Connection, connection: Connection) -> None:
    """Answer chats until the other end of the connection is closed."""
    other.close()  # otherwise this process itself would keep it open
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that waits
    _limit_memory()
    with suppress(EOFError, OSError, MemoryError):
        while True:
            connection.send_bytes(_answer(tokenizer, *connection.recv()))


def _answer(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], options: dict[str, Any]
) -> bytes:
    """The text after a `+`, the template's refusal after a `-`, or nothing for too long a text."""
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except MemoryError:
        raise
    except Exception as error:
        return b"-" + first_sentence(error).encode(errors="surrogatepass")
    given = sum(len(str(message.get("content"))) for message in messages)
    return b"" if len(text) > given + _ADDED else b"+" + text.encode(errors="surrogatepass")


def _limit_memory() -> None:
    """Limit the memory of this process, where the system says how much it has."""
    with suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + _MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
