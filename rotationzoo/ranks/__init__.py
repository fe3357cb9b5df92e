"""The processes that torchrun or accelerate launch started for one command: which of them this is,
what they tell each other, and what they add up.

Nothing outside this package knows `torch.distributed`. In a process that has not `joined` others,
`rank` is 0 and `world` is 1, so that other code needs no second path.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

from rotationzoo.ranks.launcher import launched_rank, local_world, use_one_gpu

if TYPE_CHECKING:
    import torch

    from rotationzoo.ranks.group import Group

__all__ = (
    "all_reduce", "beat", "gather", "joined", "launched_rank", "listen", "local_world", "of_first",
    "rank", "share", "tell", "use_one_gpu", "world",
)  # fmt: skip

_Item = TypeVar("_Item")
_current: ContextVar["Group | None"] = ContextVar("ranks", default=None)


def rank() -> int:
    """The number of this process. Process 0 is the one that writes and prints."""
    group = _current.get()
    return 0 if group is None else group.rank


def world() -> int:
    """How many processes share the work."""
    group = _current.get()
    return 1 if group is None else group.world


def share(items: Sequence[_Item]) -> list[_Item]:
    """Every `world`-th item, from the one at `rank` on."""
    return list(items[rank() :: world()])


@contextmanager
def joined(device: Callable[[], str]) -> Iterator[None]:
    """Share the work inside the block with the other processes of the launcher. Does nothing in a
    process that was started alone.

    - `device`: where this process computes, `cuda` or `cpu`; called where its error ends all.

    An error or Ctrl-C in one process ends the block in all of them, with the same error. Raises
    `RotationZooError` for a process that is lost, and `UsageError` if some have no GPU.
    """
    if launched_rank() is None:
        yield
        return
    from rotationzoo.ranks.group import Group  # late: `--help` must not wait for torch

    group = Group()
    token = _current.set(group)
    try:
        group.meet(device())
        yield
        group.leave()
    except KeyboardInterrupt as error:
        # A launcher also sends a signal to every process after one has failed or was killed.
        reason = None
        with suppress(RuntimeError):  # the store may have gone with its process
            reason = group.ending()
        group.leave(error)
        if reason is not None:
            raise reason from None
        raise
    except Exception as error:
        group.leave(error)
        raise
    finally:
        _current.reset(token)


def tell(name: str, message: Any = True) -> None:
    """Tell the other processes something that JSON can express. Does nothing in them. Each name is
    told once."""
    group = _current.get()
    if group is not None and group.rank == 0:
        group.set(name, message)


def listen(name: str) -> Any:
    """Wait, for as long as process 0 takes, for what it tells by this name. None in process 0."""
    group = _current.get()
    if group is None or group.rank == 0:
        return None
    group.wait_for([name], limited=False)
    return group.get(name)


def beat() -> None:
    """Give a sign of life, and raise what ended another process."""
    if (group := _current.get()) is not None:
        group.beat()


def all_reduce(sums: "torch.Tensor") -> "torch.Tensor":
    """The sum of a tensor over all processes, on the device of this one. All of them call it in the
    same order."""
    group = _current.get()
    return sums if group is None else group.all_reduce(sums)


def of_first(tensors: Mapping[str, "torch.Tensor"]) -> dict[str, "torch.Tensor"]:
    """The tensors, by name, that process 0 gives here; the others' are ignored. All of them
    call it in the same order."""
    group = _current.get()
    if group is None:
        return dict(tensors)
    from rotationzoo.ranks.packing import pack, unpack

    first = group.gather(pack([tensors]) if group.rank == 0 and tensors else b"")[0]
    return unpack(first)[0] if first else {}


def gather(results: Sequence[Mapping[str, "torch.Tensor"]]) -> list[dict[str, "torch.Tensor"]]:
    """Join what all processes computed from their parts of a list: the inverse of `share`.

    Each gives one result for every item that it got from `share`, as tensors by name, at least one.
    All of them get all results on the CPU, in the order of the list that was shared. They call this
    in the same order.
    """
    group = _current.get()
    if group is None:
        return [dict(result) for result in results]
    from rotationzoo.ranks.packing import pack, unpack

    parts = [unpack(part) for part in group.gather(pack(results))]
    count = sum(map(len, parts))
    return [parts[number % group.world][number // group.world] for number in range(count)]
