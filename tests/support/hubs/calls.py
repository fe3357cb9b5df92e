"""What a hub is asked and what it answers, and the faults that a test asks for."""

import json
import re
from dataclasses import dataclass, field
from email.message import Message
from typing import Any
from urllib.parse import parse_qs, urlsplit


@dataclass
class Fault:
    """Spoil the next `count` requests of this method whose path with its query matches the pattern.

    `what` is the status of an error, "drop" (no answer), "cut" (half of the body), "flip" (one
    wrong bit in the body), or "lost" (the request is carried out, but nobody hears of it).
    """

    method: str
    pattern: str
    what: int | str
    count: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.what, int) and self.what not in ("drop", "cut", "flip", "lost"):
            raise ValueError(f"No such fault: {self.what}")


class Refusal(Exception):
    """An error to answer with; each hub has its own way to write it."""

    def __init__(
        self, status: int, message: str, code: str | int = "", headers: dict[str, str] | None = None
    ):
        super().__init__(message)
        self.status, self.message, self.code, self.headers = status, message, code, headers or {}


@dataclass
class Call:
    method: str
    target: str  # the path with its query, as sent
    headers: Message
    body: bytes

    def __post_init__(self) -> None:
        address = urlsplit(self.target)
        self.path, self.query = address.path, parse_qs(address.query)

    def option(self, name: str, default: str = "") -> str:
        return self.query.get(name, [default])[0]

    def json(self) -> Any:
        return json.loads(self.body or b"{}")


@dataclass
class Answer:
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


def as_json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Answer:
    return Answer(
        status, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})}
    )


def ranged(call: Call, data: bytes, headers: dict[str, str]) -> Answer:
    """The bytes that the Range header asks for, or all of them."""
    wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", call.headers.get("Range", ""))
    if not wanted:
        return Answer(200, data, {"Accept-Ranges": "bytes", **headers})
    first, last = int(wanted[1]), min(int(wanted[2] or len(data)), len(data) - 1)
    if first > last:
        return Answer(416, b"", {"Content-Range": f"bytes */{len(data)}"})
    return Answer(
        206,
        data[first : last + 1],
        {"Content-Range": f"bytes {first}-{last}/{len(data)}", **headers},
    )
