"""The environment variables through which torchrun or accelerate launch informs a process."""

import os
from contextlib import suppress

from rotationzoo.errors import UsageError

_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TIMEOUT = "ROTATIONZOO_RANK_TIMEOUT"


def launched_rank() -> int | None:
    """The number of this process among those that a launcher started; None if it is alone."""
    if any(name not in os.environ for name in _VARIABLES) or os.environ["WORLD_SIZE"] == "1":
        return None
    return int(os.environ["RANK"])


def local_world() -> int:
    """How many processes of a launcher run on this machine and share its memory."""
    return 1 if launched_rank() is None else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def use_one_gpu() -> None:
    """Show this process only the GPU of its local rank, or none if there are too few.

    "cuda" then means that GPU to every library. Call this before CUDA starts.
    """
    local, visible = int(os.environ["LOCAL_RANK"]), os.environ.get("CUDA_VISIBLE_DEVICES")
    names = {local: str(local)} if visible is None else dict(enumerate(visible.split(",")))
    os.environ["CUDA_VISIBLE_DEVICES"] = names.get(local, "")


def read_timeout() -> float:
    """Seconds without a sign of life from any process, after which they are given up. Raises
    `UsageError`."""
    text = os.environ.get(_TIMEOUT, "1800")
    with suppress(ValueError):
        if (seconds := float(text)) > 0:
            return seconds
    raise UsageError(
        f"{_TIMEOUT} is {text!r} and not a number of seconds", hint=f"unset it: unset {_TIMEOUT}"
    )
