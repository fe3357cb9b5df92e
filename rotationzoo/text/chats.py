"""Chats as text, by a tokenizer's chat template. It comes with the model and may loop, so it runs
in its own process, with limits on time and memory."""

import copy
import json
import multiprocessing
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import date, datetime
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from rotationzoo.errors import RotationZooError, first_sentence

_SECONDS = 10.0  # a chat of 16 MiB took 0.1 s
_MEMORY = 1 << 30  # bytes that the process may add after its start
_ADDED = 1 << 20  # characters that a template may add to the messages
# A fork has the tokenizer at once. Outside Linux, it is not safe after torch was imported.
_METHOD = "fork" if sys.platform == "linux" else "spawn"
_SHAREGPT = {"human": "user", "gpt": "assistant", "observation": "tool", "function_call": "call"}
Message = dict[str, Any]


def read_message(given: Any) -> Message:
    """Convert a message from ShareGPT's form to OpenAI's. Raises `ValueError` for other forms."""
    fields = given if isinstance(given, dict) else {}
    # In a table, each message has the keys of all messages.
    message = {key: value for key, value in fields.items() if value not in (None, [])}
    if "from" in message:
        role = _SHAREGPT.get(str(message["from"]), message.pop("from"))
        message |= {"role": role, "content": message.pop("value", None)}
    if message.get("role") == "call":
        message |= {"role": "assistant", "tool_calls": message.pop("content")}
    if "tool_calls" in message:
        message["tool_calls"] = read_functions(message["tool_calls"])
    if "tool_calls" in message or message.get("role") == "tool":
        message.setdefault("content", "")
    kinds = {"role": str, "content": str | list | dict}
    if all(isinstance(message.get(key), kind) for key, kind in kinds.items()):
        return message
    raise ValueError(given)


def read_functions(given: Any) -> list[dict[str, Any]]:
    """Convert tools or tool calls, also in JSON, to OpenAI's form. Raises `ValueError`."""
    tools, read = from_json(given) or [], []
    for tool in map(from_json, tools if isinstance(tools, list) else [tools]):
        function = tool.get("function", tool) if isinstance(tool, dict) else {}
        if not isinstance(function.get("name"), str):
            raise ValueError(given)
        if "arguments" in function:  # servers give templates a table
            function = function | {"arguments": from_json(function["arguments"] or "{}")}
        rest = tool if "function" in tool else {}
        read.append({"type": "function", **rest, "function": function})
    return read


def from_json(value: Any) -> Any:
    """The value of a JSON text, or the given value itself."""
    with suppress(ValueError, TypeError, RecursionError):
        return json.loads(value)
    return value


def _called(messages: list[Message]) -> list[dict[str, Any]]:
    calls = (message.get("tool_calls", ()) for message in messages)
    return [call["function"] for call in chain.from_iterable(calls)]


def _forms(messages: list[Message]) -> Iterator[list[Message]]:
    """A chat in the forms that templates read: as it is, with joined texts, with JSON arguments."""
    yield messages
    messages = copy.deepcopy(messages)
    for message in messages:
        if isinstance(message["content"], list):
            with suppress(KeyError, TypeError):  # of images
                message["content"] = "\n".join(part["text"] for part in message["content"])
    yield messages
    for function in _called(messages):
        function["arguments"] = json.dumps(function.get("arguments", {}), ensure_ascii=False)
    yield messages


class ChatTemplate:
    """A tokenizer's chat template. Its process lives from the first chat to this object's end."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, day: str | None = None):
        self.tokenizer, self._day = tokenizer, day or date.today().isoformat()
        self.written_day: str | None = None
        """The day that the template may have written as today's."""
        self.note: str | None = None
        """What the template leaves out of chats."""
        self._connection: Connection | None = None

    def render(self, messages: list[Message], **options: Any) -> str:
        """The text of a chat, in the first form that the template takes without printing a Python
        dict. Raises `ValueError` if it refuses all, and `RotationZooError` beyond a limit."""
        functions = [tool["function"] for tool in options.get("tools") or ()] + _called(messages)
        tables = [message["content"] for message in messages]
        tables += [function.get("arguments") for function in functions]
        shown = [str(table) for table in tables if table and not isinstance(table, str)]
        # Text, because an exception would keep this frame and its process alive.
        refusal = "it prints parts of a content as Python objects"
        for chat in _forms(messages):
            try:
                text = self._ask(chat, options)
            except ValueError as error:
                refusal = str(error)
                continue
            if not any(table in text for table in shown):
                if any(function["name"] not in text for function in functions):
                    self.note = "the chat template does not write all tools and calls of the chats"
                return text
        raise ValueError(refusal)

    def _ask(self, messages: list[Message], options: dict[str, Any]) -> str:
        try:
            connection = self._connection = self._connection or self._start()
            connection.send((messages, options))
            answer = connection.recv_bytes() if connection.poll(_SECONDS) else b""
        except (EOFError, OSError):  # the process ended because it ran out of memory
            answer = b""
        if not answer:
            self._connection = None
            self._process.kill()
            took = f"a chat took more than {_SECONDS:g} s or {_MEMORY >> 30} GiB"
            problem = f"the tokenizer's chat template was stopped: {took}, or became"
            problem += f" {_ADDED:,} characters longer"
            raise RotationZooError(problem, "do not use this template; plain text needs none")
        text = answer[1:].decode(errors="surrogatepass")
        if answer[:1] == b"-":
            raise ValueError(text)
        return text

    def _start(self) -> Connection:
        if "strftime_now" in str(getattr(self.tokenizer, "chat_template", "")):
            self.written_day = self._day
        context: Any = multiprocessing.get_context(_METHOD)
        ends: tuple[Connection, Connection] = context.Pipe()
        given = self.tokenizer, self._day, *ends
        self._process = context.Process(target=_serve, args=given, daemon=True)
        self._process.start()
        ends[1].close()
        return ends[0]


def _serve(
    tokenizer: PreTrainedTokenizerBase, day: str, other: Connection, connection: Connection
) -> None:
    """Render chats until the other end of the connection is closed."""
    other.close()  # or this process itself would keep it open
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # `calibrate` turns it into an interrupt
    with suppress(OSError, ValueError):  # not on Linux
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + _MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    with suppress(ValueError):  # the day of a damaged checkpoint may not be one
        now = datetime.fromisoformat(day)
        vars(chat_template_utils)["datetime"] = SimpleNamespace(now=lambda: now)
    with suppress(EOFError, OSError, MemoryError):
        while True:
            connection.send_bytes(_answer(tokenizer, *connection.recv()))


def _answer(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], options: dict[str, Any]
) -> bytes:
    """`+` and the text, `-` and the template's refusal, or nothing if the text is too long."""
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except MemoryError:
        raise
    except Exception as error:
        return b"-" + first_sentence(error).encode(errors="surrogatepass")
    given = len(str(messages)) + len(str(options))
    return b"" if len(text) > given + _ADDED else b"+" + text.encode(errors="surrogatepass")
