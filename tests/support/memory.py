"""The memory that tensors take while something runs."""

from collections.abc import Callable
from typing import Any

import torch


def allocated(run: Callable[[], Any]) -> tuple[int, int, Any]:
    """The most bytes of tensors that a call has at once, those it leaves, and its result."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        result = run()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most, now, result
