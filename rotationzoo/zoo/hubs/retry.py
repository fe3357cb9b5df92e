"""Repeating calls whose failure may pass.

What the hubs' clients repeat by themselves is known from trying every fault against them. Hugging
Face's client repeats neither a 503 on the body of a file nor one on a commit; ModelScope's waits
for minutes without a word. So both are told to repeat nothing, and calls are repeated here.
"""

import time
from collections.abc import Callable
from typing import TypeVar

from rotationzoo.errors import HubError

T = TypeVar("T")
_ATTEMPTS = 4
_PAUSE_SECONDS = 1.0  # before the second attempt; doubled each time


def retry(call: Callable[[], T], may_pass: Callable[[Exception], bool]) -> T:
    """The result of a call, which is repeated with growing pauses while `may_pass` says of its
    failure that it may be gone the next time. A `HubError` is final."""
    for attempt in range(_ATTEMPTS - 1):
        try:
            return call()
        except Exception as error:
            if isinstance(error, HubError) or not may_pass(error):
                raise
            time.sleep(_PAUSE_SECONDS * 2**attempt)
    return call()
