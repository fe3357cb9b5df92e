"""A server that answers as no hub does: with raw bytes, too slowly, without end, or not at all."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field


def answer(body: bytes, headers: str = "", status: str = "200 OK") -> list[bytes]:
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{headers}"
    return [f"{head}Connection: close\r\n\r\n".encode(), body]


def trickle(start: bytes, seconds: float = 0.3) -> Iterator[bytes]:
    yield start
    while True:
        time.sleep(seconds)
        yield b"x"


def endless(start: bytes, chunk: bytes) -> Iterator[bytes]:
    yield start
    while True:
        yield chunk


@dataclass
class Broken:
    """`says` makes the chunks of an answer from a request; the connection is closed after them."""

    says: Callable[[str], object]
    endpoint: str = ""
    requests: list[str] = field(default_factory=list)
    sent: int = 0

    def serve(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:
            connection.settimeout(60)
            head = b""
            while b"\r\n\r\n" not in head:
                received = connection.recv(65536)
                if not received:
                    return
                head += received
            self.requests.append(head.decode("latin-1"))
            for chunk in self.says(self.requests[-1]):  # type: ignore[attr-defined]
                connection.sendall(chunk)
                self.sent += len(chunk)


@contextmanager
def broken(says: Callable[[str], object]) -> Iterator[Broken]:
    """Serve until the end of the block."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=50)
    server = Broken(says, f"http://127.0.0.1:{listener.getsockname()[1]}")

    def accept() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=server.serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield server
    finally:
        listener.close()


@contextmanager
def black_hole() -> Iterator[str]:
    """An address that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=50) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
