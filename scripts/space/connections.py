"""Connections that end: those that wait for the rest of a request, and those on which a proxy and
this server may disagree where a request ends. Every answer has the security headers."""

import asyncio
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

SECONDS = 5  # in which a request must have arrived
HEADERS = {
    # The hub shows a Space in a frame of its own page.
    "Content-Security-Policy": "frame-ancestors 'self' https://huggingface.co",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


class PatientProtocol(H11Protocol):
    """uvicorn's protocol, which by itself waits forever for the first request of a connection, and
    for the rest of any."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._stop()
        self._timer = self.loop.call_later(SECONDS, self._give_up)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _give_up(self) -> None:
        # A request that is being answered may take longer; it has limits of its own.
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()


class Guard:
    """The web application behind what every request and every answer goes through."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        given = Headers(scope=scope)
        if "content-length" in given and "transfer-encoding" in given:
            refusal = PlainTextResponse("one length is enough", 400, {"Connection": "close"})
            await refusal(scope, receive, send_guarded)
        else:
            await self.app(scope, receive, send_guarded)
