"""How many hostile inputs the test suite tries, by kind: the table of docs/security.md, to paste
there.

    python scripts/tools/count_hostile.py
"""

from collections import Counter
from collections.abc import Iterable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

KINDS = {
    "link": "planted links, FIFOs and other special files",
    "path": "names that lead out of their folder",
    "size": "what asks for too much memory, disk or time",
    "malformed": "wrong types, nesting, truncation",
    "hub": "a hub or an index that lies or fails",
    "terminal": "escape characters, and errors that nobody foresaw",
    "markup": "names with markup and scripts, in pages",
    "values": "numbers that are unsound",
    "crash": "processes that are killed, races, full disks",
}


def table(items: Iterable[pytest.Item]) -> str:
    """Markdown. Raises `KeyError` for a kind that has no words here."""
    marks = [mark for item in items if (mark := item.get_closest_marker("hostile"))]
    counts = Counter(mark.args[0] for mark in marks)
    rows = [
        f"| {kind} | {KINDS[kind]} | {counts[kind]} |"
        for kind in sorted(counts, key=list(KINDS).index)
    ]
    head = ["| kind | what | inputs |", "|---|---|---|"]
    foot = f"| | all | {sum(counts.values())} |"
    return "\n".join([*head, *rows, foot]) + "\n"


class _Collected:
    """A plugin of pytest that keeps the tests that it collects."""

    def __init__(self) -> None:
        self.items: list[pytest.Item] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.items = list(items)


def main() -> None:
    collected = _Collected()
    root = Path(__file__).parents[2]
    words = ["--collect-only", "-c", str(root / "pyproject.toml"), str(root / "tests")]
    with redirect_stdout(StringIO()):
        pytest.main(words, [collected])
    print(table(collected.items), end="")


if __name__ == "__main__":
    main()
