"""Retrying calls to a hub whose failures may be temporary.

The clients' own retries were tested with every kind of fault. Hugging Face's client does not retry
a 503 on the body of a file or on a commit, and ModelScope's waits silently for minutes. Both are
therefore told not to retry, and all retries happen here.
"""

import time
from collections.abc import Callable
from typing import TypeVar

from rotationzoo.errors import HubError

T = TypeVar("T")
_ATTEMPTS = 4
_PAUSE_SECONDS = 1.0  # before the second attempt; doubles each time


def retry(call: Callable[[], T], may_pass: Callable[[Exception], bool]) -> T:
    """Call until it succeeds, up to `_ATTEMPTS` times with growing pauses, and return the result.

    A failure is retried only if `may_pass` says that it may be temporary. A `HubError` never is.
    """
    for attempt in range(_ATTEMPTS - 1):
        try:
            return call()
        except Exception as error:
            if isinstance(error, HubError) or not may_pass(error):
                raise
            time.sleep(_PAUSE_SECONDS * 2**attempt)
    return call()
