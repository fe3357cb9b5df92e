"""Compares the identities of two jobs: everything that decides the bytes of a result, by key."""

from collections.abc import Iterable, Mapping
from typing import Any

Identity = Mapping[str, str]
"""A job's identity by key. A key that does not apply to the job, such as `device_map`, is left
out."""


def differences(
    saved: Mapping[str, Any], present: Identity, parts: Iterable[str] | None = None
) -> list[str]:
    """The keys in which a saved identity differs from that of the present job.

    `parts` are the keys to compare; None compares all.
    """
    keys = dict.fromkeys([*present, *saved]) if parts is None else parts
    return [key for key in keys if saved.get(key) != present.get(key)]
