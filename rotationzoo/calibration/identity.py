"""What decides the bytes of a result, key by key: two jobs are the same where all of it agrees."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

Identity = Mapping[str, str]
"""A job's own keys; one that a job has no use for, such as `budget`, is left out."""
# Earlier versions wrote `--budget` behind the type and the device map behind the device, and
# counted the machine's cores for threads.
_BUDGET = re.compile(r"(?P<dtype>.*), (?P<budget>\S+) minutes")
_DEVICE_MAP = re.compile(r"(?P<device>.*), (?P<device_map>\S+) (?P<max_memory>(?!threads$)\S*)")
_CORES = re.compile(r"(?P<device>.* CPU), \d+ threads")


def differences(
    theirs: Mapping[str, Any], ours: Identity, parts: Iterable[str] | None = None
) -> list[str]:
    """The keys, of all or of some `parts`, in which the identity on disk and that of the job at
    hand differ."""
    theirs = _in_present_form(theirs)
    keys = dict.fromkeys([*ours, *theirs]) if parts is None else parts
    return [key for key in keys if theirs.get(key) != ours.get(key) and not _unknown(key, theirs)]


def _unknown(key: str, theirs: Mapping[str, Any]) -> bool:
    """Earlier versions did not say with how many threads torch computes."""
    return key == "threads" and key not in theirs


def _in_present_form(identity: Mapping[str, Any]) -> dict[str, str]:
    found = dict(identity)
    for key, pattern in (("dtype", _BUDGET), ("device", _DEVICE_MAP), ("device", _CORES)):
        if match := pattern.fullmatch(str(found.get(key, ""))):
            found |= {name: value for name, value in match.groupdict().items() if value}
    return found
