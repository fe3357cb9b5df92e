"""The table of engines in docs/engines.md, made from the engines' own modules.

    python scripts/tools/engines_table.py

Rewrites the table where it is out of date. `tests/engines/test_registry.py` fails until that was
done.
"""

from pathlib import Path

from rotationzoo.engines.registry import ENGINE_NAMES, load_engine

PAGE = Path(__file__).parents[2] / "docs" / "engines.md"
COLUMNS = [
    "engine",
    "where it has OSCAR's 2-bit cache",
    "reads",
    "rotation per KV head",
    "key mean",
    "clip ratios",
    "exact windows",
    "what else is not served, or done in its own way",
]
CLIP_RATIOS = {"one": "one", "side": "one for keys, one for values", "layer": "two a layer"}


def table() -> str:
    """The table in Markdown: a header, and a row for each engine."""
    rows = [COLUMNS, ["---"] * len(COLUMNS)]
    rows += [_row(name) for name in ENGINE_NAMES]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def current_table(page: str) -> str:
    """The table that the page has: from its header to the first line that is no row."""
    begin = page.index("| engine |")
    return page[begin : page.index("\n\n", begin) + 1]


def _row(name: str) -> list[str]:
    engine = load_engine(name)
    can, about = engine.CAPABILITIES, engine.DESCRIPTION
    heads, mean, windows = (_yes(flag) for flag in (can.heads, can.mean, can.windows))
    clip = CLIP_RATIOS[can.clip]
    return [f"`{name}`", about.cache, about.reads, heads, mean, clip, windows, about.limits]


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(text.replace(current_table(text), table()), encoding="utf-8")
