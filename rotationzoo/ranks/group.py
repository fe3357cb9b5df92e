"""The processes of one command: how they wait for each other, add up, and hear that one has failed
or was lost."""

import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from rotationzoo.errors import ProcessLost, RotationZooError, Unsound, UsageError, first_sentence
from rotationzoo.ranks.launcher import read_timeout

_PAUSE = 0.02  # seconds between two looks at the store
_RARELY = 20  # looks at a collective, which is quick, between two at the store
_BROKEN = "onnection closed", "onnection reset", "roken pipe"
_FULL = "out of memory"  # torch's words, and CUDA's that NCCL quotes
_DONE, _INTERRUPTED = "done", "interrupted"
_ERRORS = {kind.__name__: kind for kind in (RotationZooError, UsageError, Unsound, ProcessLost)}


class Group:
    """This process, `rank`, of `world` processes, and the launcher's key-value store through which
    they hear of each other."""

    def __init__(self) -> None:
        self._timeout = read_timeout()
        limit = timedelta(seconds=self._timeout)
        with _as_lost():
            self._store, self.rank, self.world = next(rendezvous("env://", timeout=limit))
        self._device = "cpu"
        self._sums = 0  # collectives so far
        self._connecting: threading.Thread | None = None
        self._failure: RuntimeError | None = None

    def meet(self, device: str) -> None:
        """Wait for all processes; this one computes on `device`. Raises `UsageError` if some have a
        GPU and some have none."""
        self._device = device
        self.set(f"hello/{self.rank}", [socket.gethostname(), os.getpid(), device])
        names = self._of_all("hello")
        self.wait_for(names)
        on_cpu = [self.get(name)[2] for name in names].count("cpu")
        if 0 < on_cpu < self.world:
            raise UsageError(
                f"{on_cpu} of {self.world} processes have no GPU of their own",
                hint="start as many processes as there are GPUs, or add: --device cpu",
            )
        if device == "cuda":
            # NCCL takes seconds to connect, in which the model can load.
            self._begin_to_connect()

    def set(self, name: str, content: Any) -> None:
        with _as_lost():
            self._store.set(name, json.dumps(content))

    def get(self, name: str) -> Any:
        return json.loads(self._store.get(name))

    def beat(self) -> None:
        """Give a sign of life, and raise what ended another process."""
        with _as_lost():
            self._store.add(f"beat/{self.rank}", 1)
            self._look()

    def wait_for(self, names: list[str], limited: bool = True) -> None:
        """Wait until all names are set. Raises what ended another process, and `ProcessLost` if,
        with a limit, no process gave a sign of life for too long."""
        beats, since = [-1], time.monotonic()
        with _as_lost():
            while not self._store.check(names):
                self._look()
                latest = [self._store.add(name, 0) for name in self._of_all("beat")]
                if latest != beats:
                    beats, since = latest, time.monotonic()
                if limited and time.monotonic() - since > self._timeout:
                    raise _lost(f"gave no sign of life for {self._timeout:g} s")
                time.sleep(_PAUSE)

    def all_reduce(self, sums: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over all processes, on the device of this one."""
        total = sums.to(self._device, copy=True)
        # A collective cannot be interrupted while it waits for a lost process, so wait here first.
        self._sums += 1
        self.set(f"sum {self._sums}/{self.rank}", True)
        self.wait_for(self._of_all(f"sum {self._sums}"))
        with _as_lost():
            self._wait_for_connection()
            work = dist.all_reduce(total, async_op=True)
            # NCCL would wait for a process that is lost now until its timeout.
            for look in itertools.count(1):
                if work.is_completed():
                    break
                if look % _RARELY == 0:
                    self._look()
                time.sleep(_PAUSE / _RARELY)
            work.wait()
        return total

    def gather(self, part: bytes) -> list[bytes]:
        """The bytes that every process gives, in the order of their numbers."""
        # Sums of zeros and one other number are exact, and `all_reduce` notices a lost process.
        sizes = torch.zeros(self.world, dtype=torch.long)
        sizes[self.rank] = len(part)
        sizes = self.all_reduce(sizes).cpu()
        rows = torch.zeros(self.world, max(1, int(sizes.max())), dtype=torch.uint8)
        if part:
            rows[self.rank, : len(part)] = torch.frombuffer(bytearray(part), dtype=torch.uint8)
        rows = self.all_reduce(rows).cpu()
        return [row[:size].numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]

    def leave(self, error: BaseException | None = None) -> None:
        """Tell the others how this process ends."""
        ending = [_DONE, "", None]
        if isinstance(error, Exception):
            kind, hint = type(error).__name__, getattr(error, "hint", None)
            known = kind if kind in _ERRORS else RotationZooError.__name__
            message = str(error) if isinstance(error, RotationZooError) else first_sentence(error)
            ending = [known, message, hint]
        elif error is not None:
            ending = [_INTERRUPTED, "", None]
        with suppress(RotationZooError):  # the store may have gone with its process
            self.set(f"ended/{self.rank}", ending)
        # After an error, the end of the connections could wait for a process that is lost.
        if error is None and self._connecting is not None:
            with suppress(RuntimeError, RotationZooError, KeyboardInterrupt):
                self._wait_for_connection()
                dist.destroy_process_group()

    def ending(self) -> BaseException | None:
        """The reason why another process ended too early, if one has: its error, first of all; that
        it is gone without a word; or `KeyboardInterrupt`."""
        others = [number for number in range(self.world) if number != self.rank]
        # Looked up before the words, because a process leaves its word before it is gone.
        gone = [number for number in others if self._is_gone(number)]
        endings = {number: self._word(number) for number in others}
        for kind, message, hint in endings.values():
            if kind in _ERRORS:
                return _ERRORS[kind](message, hint)
        if any(not endings[number][0] for number in gone):
            return _lost("is gone")
        interrupted = any(kind == _INTERRUPTED for kind, _, _ in endings.values())
        return KeyboardInterrupt() if interrupted else None

    def _look(self) -> None:
        ending = self.ending()
        if ending is not None:
            raise ending

    def _word(self, number: int) -> tuple[str, str, str | None]:
        """How a process says that it ended: a kind, a message and a hint. The kind is empty while
        it runs."""
        name = f"ended/{number}"
        if not self._store.check([name]):
            return "", "", None
        kind, message, hint = self.get(name)
        return kind, message, hint

    def _is_gone(self, number: int) -> bool:
        """Whether a process of this machine exists no more. torchrun removes one that was killed
        before it sends signals to the others."""
        name = f"hello/{number}"
        if not self._store.check([name]):
            return False
        host, process, _ = self.get(name)
        if host != socket.gethostname():
            return False
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return False

    def _of_all(self, name: str) -> list[str]:
        return [f"{name}/{number}" for number in range(self.world)]

    def _begin_to_connect(self) -> None:
        self._connecting = threading.Thread(target=self._connect, name="connect", daemon=True)
        self._connecting.start()

    def _wait_for_connection(self) -> None:
        """Wait until this process is connected with the others."""
        if self._connecting is None:
            self._begin_to_connect()
        assert self._connecting is not None
        while self._connecting.is_alive():
            self._connecting.join(_PAUSE)
            self._look()
        if self._failure is not None:
            raise self._failure

    def _connect(self) -> None:
        try:
            self._join_process_group()
        except RuntimeError as failure:
            self._failure = failure

    def _join_process_group(self) -> None:
        # A store serves one thread at a time; older versions of torch cannot copy it.
        store = self._store.clone() if hasattr(self._store, "clone") else self._store
        dist.init_process_group(
            "nccl" if self._device == "cuda" else "gloo",
            store=store,
            rank=self.rank,
            world_size=self.world,
            timeout=timedelta(seconds=self._timeout),
        )
        # The first collective makes the connections.
        dist.all_reduce(torch.zeros(1, device=self._device))
        if self._device == "cuda":
            torch.cuda.synchronize()


def _lost(how: str) -> ProcessLost:
    return ProcessLost(
        f"a process of this command {how}",
        hint="run the same command again: it goes on from whatever was saved",
    )


@contextmanager
def _as_lost() -> Iterator[None]:
    """Turn torch's errors about connections into the sentence about a lost process. Memory that is
    full in this process is no such error."""
    try:
        yield
    except RuntimeError as error:
        reason = first_sentence(error)
        if isinstance(error, torch.OutOfMemoryError) or _FULL in str(error):
            raise RotationZooError(
                f"a process has no memory left to add up its results with the others: {reason}",
                hint="run the same command again with a smaller --batch",
            ) from error
        # gloo says in many words that the process at the other end is gone.
        is_gone = any(sign in reason for sign in _BROKEN)
        raise _lost("is gone" if is_gone else f"cannot be reached: {reason}") from error
