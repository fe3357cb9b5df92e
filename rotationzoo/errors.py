"""The errors that rotationzoo raises for known failures, and their exit codes."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager


class RotationZooError(Exception):
    """A known failure: one sentence says what went wrong, and `hint` what to do next."""

    exit_code = 1  # of the command line

    def __init__(self, message: str, hint: str | None = None):
        super().__init__(message)
        self.hint = hint


class UsageError(RotationZooError):
    """Options that contradict each other or are out of range. Raised before anything is read."""

    exit_code = 2


class UnsupportedModel(RotationZooError):
    """A model whose cache cannot be rotated per KV head, or whose attention cannot be captured."""


class ModelUnavailable(RotationZooError):
    """A model that cannot be found, reached or read."""


class Unsound(RotationZooError):
    """Numbers that no artifact may hold: not finite, not orthogonal, or unlike its statistics."""


class HubError(RotationZooError):
    """A request that a hub or the network refused. `missing`: the hub says that it does not exist;
    `hidden`: it may be missing or private."""

    def __init__(
        self, message: str, hint: str | None = None, missing: bool = False, hidden: bool = False
    ):
        super().__init__(message, hint)
        self.missing, self.hidden = missing, hidden


class StaleParent(HubError):
    """Someone else has committed to the repository since it was read."""


class PartlyDone(RotationZooError):
    """Some of the work is done and some is not; the hint is the command that finishes it."""

    exit_code = 3


class Undecided(RotationZooError):
    """A check without a result."""

    exit_code = 4


class Interrupted(RotationZooError):
    """The user stopped the command; the hint is the command that continues."""

    exit_code = 130


def first_sentence(error: BaseException) -> str:
    """One line from another library's error message: the first, with the second if the first ends
    in a colon or counts validation errors; or the error's type if there is no message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    count = 2 if lines[0].endswith(":") or "validation error" in lines[0] else 1
    return " ".join(lines[:count]).partition(" [type=")[0].rstrip(".")


@contextmanager
def as_refusal(
    what: str, hint: str | None = None, kind: type[RotationZooError] = RotationZooError
) -> Iterator[None]:
    """Turn any error raised inside the block into one of this `kind`, with `what` and the first
    line of the original as its message. A `RotationZooError` passes unchanged."""
    try:
        yield
    except (RotationZooError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic in Rust is not an `Exception`
        raise kind(f"{what}: {first_sentence(error):.400}", hint) from error


def as_unavailable(
    what: str, hint: str = "run again with ROTATIONZOO_DEBUG=1 for the traceback"
) -> AbstractContextManager[None]:
    """As `as_refusal`, with a `ModelUnavailable`."""
    return as_refusal(what, hint, ModelUnavailable)
