"""Seconds and bytes: what comes within the limits is passed on, and what does not is one
sentence."""

import contextvars

import pytest

from rotationzoo.network import limits


def test_a_call_in_time_gives_its_result_or_its_own_error():
    variable = contextvars.ContextVar("variable")
    variable.set("seen")
    assert limits.call_within(5.0, variable.get, "host") == "seen"
    assert limits.call_within(5.0, lambda: None, "host") is None
    with pytest.raises(KeyError, match="its own"):
        limits.call_within(5.0, lambda: {}["its own"], "host")
