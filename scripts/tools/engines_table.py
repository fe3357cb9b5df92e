"""The table of docs/engines.md that says what `--for` picks, made from the rows of the registry.

    python scripts/tools/engines_table.py

Rewrites the table. `tests/engines/test_engine_rows.py` fails if the page is outdated.
"""

from pathlib import Path

from rotationzoo.codec.engine_needs import ENGINE_NAMES, ENGINES, Entry
from rotationzoo.codec.formats import BUDGETED

PAGE = Path(__file__).parents[2] / "docs" / "engines.md"
COLUMNS = [
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
CLIP_RATIOS = {
    "none": "none", "one": "one", "side": "one for keys, one for values", "head": "all"
}  # fmt: skip
EARLIER = {"server": "the first tokens", "window": "the first tokens and the window"}


def table() -> str:
    """What `--for` picks for each engine, in Markdown."""
    rows = [COLUMNS, ["---"] * len(COLUMNS), *map(_picks, ENGINE_NAMES)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def current_table(page: str) -> str:
    """The page's table: from its header to the first line that is not a row."""
    begin = page.index(f"| {COLUMNS[0]} | {COLUMNS[1]} |")
    return page[begin : page.index("\n\n", begin) + 1]


def _picks(name: str) -> list[str]:
    entry = ENGINES[name]
    start = f"`rotationzoo {entry.command}`" if entry.command else "`export` prints it"
    format = f"`{entry.format}`" if entry.format else "its own, not simulated"
    if entry.budget and entry.format:
        format += f", or `{BUDGETED}` with a budget of bits"
    return [
        f"`{name}`",
        f"`{entry.recipe}`",
        _rotations(entry),
        _means(entry),
        CLIP_RATIOS[entry.clip],
        "the artifact's" if entry.windows else "none",
        "transform coding" if entry.budget and entry.rotates else "nearest",
        format,
        EARLIER[entry.prefill_layout] if entry.windows else "nothing",
        start,
    ]


def _rotations(entry: Entry) -> str:
    if "key" not in entry.takes:
        return "of latents"
    if not entry.rotates:
        return "none: the bits of layers alone"
    rotations = "per KV head" if entry.heads else "per layer"
    return f"{rotations}, or of latents" if "latent" in entry.takes else rotations


def _means(entry: Entry) -> str:
    names = [f"{side}s" for side in entry.takes if side in entry.means]
    return ", ".join(names) or "none"


if __name__ == "__main__":
    text = PAGE.read_text("utf-8")
    PAGE.write_text(text.replace(current_table(text), table()), "utf-8")
