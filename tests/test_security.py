"""The table of hostile inputs in docs/security.md has the numbers of this suite."""

from pathlib import Path

import pytest
from count_hostile import KINDS, table

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "security.md"


def test_the_page_has_the_number_of_hostile_inputs_by_kind(request):
    """The numbers are those of the whole suite, which `make test` collects."""
    items, options = request.session.items, request.config.option
    missing = set(TESTS.rglob("test_*.py")) - {item.path for item in items}
    if missing or options.keyword or options.deselect or getattr(options, "lf", False):
        pytest.skip("only some of the tests were collected")
    assert table(items) in PAGE.read_text(), "paste what `make security` prints"


def test_every_hostile_test_is_of_a_known_kind(request):
    marks = [mark for item in request.session.items if (mark := item.get_closest_marker("hostile"))]
    assert {mark.args[0] for mark in marks} <= KINDS.keys()
