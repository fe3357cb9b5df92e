"""The tables of engines in docs/engines.md, made from the engines' rows and modules.

    python scripts/tools/engines_table.py

Rewrites the tables where they are out of date. `tests/engines/test_registry.py` fails until that
was done.
"""

from pathlib import Path

from rotationzoo.engines.registry import ENGINE_NAMES, ENGINES, load_engine

PAGE = Path(__file__).parents[2] / "docs" / "engines.md"
PICKED = [
    "`--for`",
    "recipe",
    "rotations",
    "means",
    "clip ratios",
    "exact windows",
    "codes",
    "format",
    "earlier chunks keep exact",
    "how it is started",
]
FILES = [
    "engine",
    "where it has OSCAR's 2-bit cache",
    "reads",
    "what is not served, or done in its own way",
]
CLIP_RATIOS = {"one": "one", "side": "one for keys, one for values", "head": "all"}
EARLIER = {"server": "the first tokens", "window": "the first tokens and the window"}


def tables() -> list[str]:
    """Both tables in Markdown: what `--for` picks for each engine, and the files that engines
    read."""
    picked = [_picks(name) for name in ENGINE_NAMES]
    files = [_files(name) for name in ENGINE_NAMES if ENGINES[name].module]
    return [_markdown(PICKED, picked), _markdown(FILES, files)]


def current_tables(page: str) -> list[str]:
    """The tables that the page has: from their headers to the first line that is no row."""
    begins = [page.index(f"| {columns[0]} | {columns[1]} |") for columns in (PICKED, FILES)]
    return [page[begin : page.index("\n\n", begin) + 1] for begin in begins]


def _markdown(columns: list[str], rows: list[list[str]]) -> str:
    every = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in every)


def _picks(name: str) -> list[str]:
    entry = ENGINES[name]
    start = f"`rotationzoo {entry.command}`" if entry.command else "`export` prints it"
    return [
        f"`{name}`",
        f"`{entry.recipe}`",
        "per KV head" if entry.heads else "per layer",
        " and ".join(f"{side}s" for side in entry.means) or "none",
        CLIP_RATIOS[entry.clip],
        "the artifact's" if entry.windows else "none",
        "error feedback" if entry.feedback else "nearest",
        f"`{entry.format}`" if entry.format else "its own, not simulated",
        EARLIER[entry.prefill_layout] if entry.windows else "nothing",
        start,
    ]


def _files(name: str) -> list[str]:
    about = load_engine(name).DESCRIPTION
    return [f"`{name}`", about.cache, about.reads, about.limits]


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    for old, new in zip(current_tables(text), tables(), strict=True):
        text = text.replace(old, new)
    PAGE.write_text(text, encoding="utf-8")
