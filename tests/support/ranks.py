"""Several processes of one command: all of them, started as torchrun does, or one that the test
stands in for."""

import json
import os
import socket
import subprocess
import time

import torch.distributed as dist


class Beside:
    """Makes this process one of two, and speaks for the other one through the launcher's store."""

    def __init__(self, monkeypatch, rank: int):
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.other = 1 - rank
        told = {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": self.store.port, "TORCHELASTIC_USE_AGENT_STORE": True,
        }  # fmt: skip
        for name, value in told.items():
            monkeypatch.setenv(name, str(value))
        self.say_hello()

    def tell(self, name: str, content) -> None:
        # Some versions of torch set the keys of every attempt apart.
        for prefix in ("", "/worker/attempt_0/"):
            self.store.set(prefix + name, json.dumps(content))

    def say_hello(self, process=None, device="cpu") -> None:
        """The other process has this id, by default that of this one, which runs."""
        host = socket.gethostname()
        self.tell(f"hello/{self.other}", [host, process or os.getpid(), device])

    def end(self, kind: str, message: str = "", hint: str | None = None) -> None:
        self.tell(f"ended/{self.other}", [kind, message, hint])


class Launcher:
    """Starts processes of the command line as torchrun does, and holds the store through which they
    find each other."""

    def __init__(self, command):
        self.command = command
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes = []

    def start(self, *words, ranks=(0, 1), world=2, **environment):
        for rank in ranks:
            told = {
                "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": self.store.port, "TORCHELASTIC_USE_AGENT_STORE": True,
                "TORCHELASTIC_RESTART_COUNT": 0, "OMP_NUM_THREADS": 1, **environment,
            }  # fmt: skip
            process = subprocess.Popen(
                [*self.command.program, *map(str, words)],
                cwd=self.command.folder,
                env=self.command.environment | {name: str(value) for name, value in told.items()},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            self.processes.append(process)
        return self

    def ended(self) -> list[subprocess.CompletedProcess]:
        """How all processes ended, once they have."""
        results = []
        for process in self.processes:
            stdout, stderr = process.communicate(timeout=60)
            results.append(
                subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)
            )
        return results

    def process_id(self, rank: int) -> int:
        """The id that a process has told the others."""
        # Some versions of torch set the keys of every attempt apart.
        names = [f"hello/{rank}", f"/worker/attempt_0/hello/{rank}"]
        until = time.monotonic() + 30
        while not (told := [name for name in names if self.store.check([name])]):
            assert time.monotonic() < until, "the process never said hello"
            time.sleep(0.01)
        return int(self.store.get(told[0]).split(b",")[1])


def silent(result, code: int) -> None:
    assert (result.returncode, result.stdout, result.stderr) == (code, "", "")
