"""The errors that rotationzoo raises when it knows what went wrong, and their exit codes."""

from collections.abc import Iterator
from contextlib import contextmanager


class RotationZooError(Exception):
    """A known failure: one sentence saying what was wrong and, as `hint`, what to do next.

    `exit_code` is what the command line exits with.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None):
        super().__init__(message)
        self.hint = hint


class UsageError(RotationZooError):
    """Options that contradict each other or are out of range, found before anything is read."""

    exit_code = 2


class UnsupportedModel(RotationZooError):
    """A model whose cache a rotation per head does not fit, or whose attention cannot be read."""


class ModelUnavailable(RotationZooError):
    """A model that could not be found, reached or read."""


class Unsound(RotationZooError):
    """Numbers that no artifact may hold: not finite, not orthogonal, or not from the statistics
    beside them."""


class HubError(RotationZooError):
    """A request that a hub, or the network between, refused.

    `missing`: the hub says that what was asked for does not exist. `hidden`: the hub does not tell
    somebody without a token whether it is missing or private.
    """

    def __init__(
        self, message: str, hint: str | None = None, missing: bool = False, hidden: bool = False
    ):
        super().__init__(message, hint)
        self.missing, self.hidden = missing, hidden


class StaleParent(HubError):
    """Somebody else has committed to the repository since it was read."""


class PartlyDone(RotationZooError):
    """Some of the work is done and some is not; the hint is the command that finishes it."""

    exit_code = 3


class Interrupted(RotationZooError):
    """Stopped by the user; the hint is the command that continues."""

    exit_code = 130


def first_sentence(error: BaseException) -> str:
    """The first line of another library's message, joined with the second where it ends in a colon;
    the error's type where the message is empty."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    count = 2 if lines[0].endswith(":") else 1
    return " ".join(lines[:count]).rstrip(".")


@contextmanager
def as_unavailable(
    what: str, hint: str = "run again with ROTATIONZOO_DEBUG=1 for the traceback"
) -> Iterator[None]:
    """Turn whatever a library raises inside the block into a `ModelUnavailable`: `what`, and the
    first line of its message."""
    try:
        yield
    except RotationZooError:
        raise
    except Exception as error:
        raise ModelUnavailable(f"{what}: {first_sentence(error)}", hint=hint) from error
