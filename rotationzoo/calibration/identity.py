"""Compares the identities of two jobs: everything that decides the bytes of a result, by key."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

Identity = Mapping[str, str]
"""A job's identity by key. A key that does not apply to the job, such as `budget`, is left out."""
# Earlier versions appended `--budget` to the dtype and the device map to the device. They also
# recorded the machine's cores as threads.
_BUDGET = re.compile(r"(?P<dtype>.*), (?P<budget>\S+) minutes")
_DEVICE_MAP = re.compile(r"(?P<device>.*), (?P<device_map>\S+) (?P<max_memory>(?!threads$)\S*)")
_CORES = re.compile(r"(?P<device>.* CPU), \d+ threads")


def differences(
    saved: Mapping[str, Any], present: Identity, parts: Iterable[str] | None = None
) -> list[str]:
    """The keys in which a saved identity differs from that of the present job.

    `parts` are the keys to compare; None compares all.
    """
    saved = _upgrade(saved)
    keys = dict.fromkeys([*present, *saved]) if parts is None else parts
    return [
        key for key in keys if saved.get(key) != present.get(key) and not _is_unknown(key, saved)
    ]


def _is_unknown(key: str, saved: Mapping[str, Any]) -> bool:
    """Whether the saved identity cannot answer: earlier versions did not record how many threads
    torch used."""
    return key == "threads" and key not in saved


def _upgrade(identity: Mapping[str, Any]) -> dict[str, str]:
    """Convert an identity that an earlier version wrote to the present keys."""
    upgraded = dict(identity)
    for key, pattern in (("dtype", _BUDGET), ("device", _DEVICE_MAP), ("device", _CORES)):
        match = pattern.fullmatch(str(upgraded.get(key, "")))
        if match:
            upgraded |= {name: value for name, value in match.groupdict().items() if value}
    return upgraded
