"""The HTTP server around a hub, which spoils the answers that a test wants spoilt."""

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from support.hubs.hub import Answer, Call, Hub, Refusal


class Server(ThreadingHTTPServer):
    """A server that hangs up when it stops: a client that kept its connection must not reach a hub
    that is gone."""

    daemon_threads = True

    def __init__(self, hub: Hub):
        super().__init__(("127.0.0.1", 0), Handler)
        self.hub = hub
        self.connections: set[socket.socket] = set()

    def process_request(self, request, client_address) -> None:
        self.connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request) -> None:
        self.connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request, client_address) -> None:
        # A client that went away is no error of the hub.
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def stop(self) -> None:
        self.shutdown()
        for connection in list(self.connections):
            self.shutdown_request(connection)
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Headers and body are two writes, and the second would wait for the first.
    disable_nagle_algorithm = True
    server: Server

    def log_message(self, *_) -> None:
        pass

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def handle_call(self) -> None:
        hub, call = self.server.hub, Call(self.command, self.path, self.headers, self.body())
        fault = hub.record(call)
        what = fault.what if fault else None
        if isinstance(what, int):
            headers = {"Retry-After": "0"} if what == 429 else {}
            return self.send(
                hub.refused(Refusal(what, "A fault that the test asked for", headers=headers))
            )
        if isinstance(what, Answer):
            return self.send(what)
        answer = hub.answer(call) if what != "drop" else Answer()
        if what in ("drop", "lost"):
            self.close_connection = True
            return None
        if fault and not answer.body:
            fault.count += 1  # it waits for one with a body, such as that behind a redirect
        return self.send(answer, what)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_call

    def send(self, answer: Answer, what: str | None = None) -> None:
        self.send_response(answer.status)
        for name, value in {"Content-Length": str(len(answer.body)), **answer.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        body, middle = answer.body, len(answer.body) // 2
        if what == "flip" and body:
            body = body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]
        if what == "cut":
            body, self.close_connection = body[:middle], True
        self.wfile.write(body)


@contextmanager
def running(hub: Hub) -> Iterator[Any]:
    """Serve a hub until the end of the block."""
    server = Server(hub)
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    hub.storage_origin = f"http://localhost:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield hub
    finally:
        server.stop()


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
