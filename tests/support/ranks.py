"""Another process of the same command, which the test stands in for."""

import json
import os
import socket

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
