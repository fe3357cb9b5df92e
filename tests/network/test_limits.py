"""Seconds and bytes: what comes within the limits is passed on, and what does not is one
sentence."""

import contextvars
import threading
import time

import pytest

from rotationzoo.errors import HubError
from rotationzoo.network import limits


def test_a_call_in_time_gives_its_result_or_its_own_error():
    variable = contextvars.ContextVar("variable")
    variable.set("seen")
    assert limits.call_within(5.0, variable.get, "host") == "seen"
    assert limits.call_within(5.0, lambda: None, "host") is None
    with pytest.raises(KeyError, match="its own"):
        limits.call_within(5.0, lambda: {}["its own"], "host")


def test_a_call_that_takes_longer_is_left_to_itself(caplog, monkeypatch):
    monkeypatch.setattr(limits, "NOTICE_SECONDS", 0.05)
    answered = threading.Event()
    started = time.monotonic()
    for _ in range(2):
        with pytest.raises(TimeoutError, match=r"slow\.example did not answer within 0\.2 s"):
            limits.call_within(0.2, answered.wait, "slow.example")
    assert time.monotonic() - started < 5
    answered.set()
    assert caplog.messages.count("Waiting for slow.example") == 1, "each host is named once"


def test_a_compressed_answer_is_refused():
    for encoding in ("identity", "", "IDENTITY"):
        limits.check_encoding({"content-encoding": encoding}, "it")
    limits.check_encoding({}, "it")
    with pytest.raises(HubError, match="it sent a compressed answer"):
        limits.check_encoding({"content-encoding": "gzip"}, "it")
