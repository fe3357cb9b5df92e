"""The prompt of `generate`: given as a text or a file, or piped into the command."""

import os
import select
import stat
import sys
from collections.abc import Callable
from pathlib import Path

from rotationzoo.errors import UsageError

_LONGEST = 16 << 20  # bytes, of which English has four a token
_PATIENCE = 2.0  # seconds
_HINT = 'give a text with --prompt "TEXT" or --file FILE'


def read_prompt(text: str | None, file: Path | None, note: Callable[[str], None]) -> str | None:
    """The prompt of these options or, without them, what is piped into the command. None if there
    is neither.

    Of a file and of standard input, the last line end is left out: editors and `echo` write it, and
    a model would go on in a new line. `note` says that the command waits for a prompt. Raises
    `UsageError` for more than one prompt, and for what is no text.
    """
    if text is not None and file is not None:
        raise UsageError("--prompt and --file are two prompts", hint="leave out one of them")
    if text is not None:
        # Arguments that are not UTF-8 reach Python as lone surrogates, which no tokenizer takes.
        return _checked(os.fsencode(text), "--prompt")
    if file is not None and str(file) != "-":
        return _without_line_end(_checked(_read_file(file), str(file)))
    if file is None and not _is_piped():
        return None
    content = b""
    if sys.stdin is not None:
        if not select.select([sys.stdin], [], [], _PATIENCE)[0]:
            note("Waiting for a prompt on standard input")
        content = sys.stdin.buffer.read(_LONGEST + 1)
    return _without_line_end(_checked(content, "standard input"))


def _read_file(file: Path) -> bytes:
    # The user named the file, so a link or the pipe of a shell's <(...) is as good as a file. To
    # open a pipe would otherwise wait for a writer; a read ends where there is none.
    try:
        handle = os.open(file.expanduser(), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as content:
            select.select([content], [], [], _PATIENCE)
            os.set_blocking(handle, True)
            return content.read(_LONGEST + 1)
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}", hint=_HINT) from error


def _is_piped() -> bool:
    """Whether standard input is a pipe or a file, and no terminal or /dev/null."""
    if sys.stdin is None:
        return False
    try:
        return not stat.S_ISCHR(os.fstat(sys.stdin.fileno()).st_mode)
    except (OSError, ValueError):  # closed, or not of this process
        return False


def _checked(content: bytes, name: str) -> str:
    if len(content) > _LONGEST:
        raise UsageError(f"{name} has more than {_LONGEST >> 20} MiB", hint="give a shorter prompt")
    if not content.strip():
        raise UsageError(f"{name} is empty", hint=_HINT)
    if b"\0" in content:
        raise UsageError(f"{name} is no text: it holds zero bytes", hint=_HINT)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        hint = "convert it, for example with: iconv -f latin1 -t utf-8"
        raise UsageError(f"{name} is no UTF-8 text: byte {error.start} is wrong", hint) from error


def _without_line_end(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r")
