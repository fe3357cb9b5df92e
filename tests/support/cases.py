"""Which cases of a table `make test` runs."""

from collections.abc import Iterable

import pytest


def quick_first(cases: Iterable, quick: int = 1) -> list:
    """Parameters of which the first so many are quick, and all others thorough."""
    params = []
    for number, case in enumerate(cases):
        marks = [pytest.mark.thorough] * (number >= quick)
        params.append(pytest.param(*case if isinstance(case, tuple) else [case], marks=marks))
    return params
