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
    saved: Mapping[str, Any], present: Identity, parts: Iterable[str] | None = None
) -> list[str]:
    """The keys in which the identity saved on disk and that of the present job differ.

    `parts` are the keys to compare; None compares all.
    """
    saved = _upgrade(saved)
    keys = dict.fromkeys([*present, *saved]) if parts is None else parts
    return [
        key for key in keys if saved.get(key) != present.get(key) and not _is_unknown(key, saved)
    ]


def _is_unknown(key: str, saved: Mapping[str, Any]) -> bool:
    """Earlier versions did not say with how many threads torch computes."""
    return key == "threads" and key not in saved


def _upgrade(identity: Mapping[str, Any]) -> dict[str, str]:
    """An identity that an earlier version wrote, with the keys of this one."""
    upgraded = dict(identity)
    for key, pattern in (("dtype", _BUDGET), ("device", _DEVICE_MAP), ("device", _CORES)):
        match = pattern.fullmatch(str(upgraded.get(key, "")))
        if match:
            upgraded |= {name: value for name, value in match.groupdict().items() if value}
    return upgraded
