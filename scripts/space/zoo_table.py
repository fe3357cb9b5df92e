"""The table of a zoo: every published rotation of an index, to search and to sort, with links to
its files and the command that fetches it."""

import shlex
from dataclasses import dataclass
from operator import attrgetter
from typing import Any
from urllib.parse import quote

from rotationzoo.artifact.store import CARD, REPORT
from rotationzoo.figures import UNKNOWN, change, number
from rotationzoo.zoo.hubs.protocol import HUBS
from rotationzoo.zoo.index import OTHER_QUESTIONS, Copy, Entry, Listed, kept_words
from rotationzoo.zoo.lookup import LoadedIndex


@dataclass(frozen=True)
class Cell:
    """A figure in words, and the number or text to sort it by; None if it is not known."""

    words: str
    value: float | str | None = None


@dataclass(frozen=True)
class Row:
    """One entry, and what its row shows besides."""

    entry: Entry
    recipe: str
    figures: dict[str, Cell]
    """By the titles of `COLUMNS`."""
    command: str | None
    copies: list[tuple[str, dict[str, str]]]
    """Where its files are: a repository on a hub, and the addresses to read there, by their
    words."""


COLUMNS = {"Answers": True, "Cost": False, "Bits": False, "Size": False, "Date": True}
"""The title of each column of figures, and whether the best are the largest."""


def table_values(rows: list[Row]) -> dict[str, Any]:
    """What `zoo_table.html.jinja` shows: the rows, sorted until the reader sorts them, the columns
    that are not empty, and whether the quality of some rows was not measured."""
    rows = sorted(rows, key=lambda row: (row.entry.model.lower(), row.recipe))
    known = {title for row in rows for title, cell in row.figures.items() if cell.value is not None}
    columns = [
        {"title": title, "largest_first": largest}
        for title, largest in COLUMNS.items()
        if title in known
    ]
    unmeasured = any(row.figures["Answers"].value is None for row in rows)
    return {"rows": rows, "columns": columns, "unmeasured": unmeasured}


def make_row(loaded: LoadedIndex, entry: Entry, place: list[str]) -> Row:
    """The row of one entry in `zoo_table.html.jinja`. `place`: the options of `pull` that name the
    index, as `["--repo", "owner/zoo"]`."""
    copies = [
        (f"{copy.repo} on {HUBS[copy.hub].title}", copy_links(loaded, entry, copy))
        for copy in entry.copies
    ]
    recipe = ", ".join(filter(None, (entry.recipe, entry.rope_scaling)))
    figures = _figures(entry, loaded.content.entries)
    return Row(entry, recipe, figures, pull_command(loaded, entry, place), copies)


def _figures(entry: Entry, entries: list[Entry]) -> dict[str, Cell]:
    figures, decision = entry.summary or Listed(), entry.decision
    words = kept_words(entry, entries)
    kept = decision.kept if decision and words != OTHER_QUESTIONS else None
    sizes = [file.size for file in entry.files.values() if file.size is not None]
    size = sum(sizes) if 0 < len(sizes) == len(entry.files) else None
    date = entry.created and entry.created[:10]
    return {
        "Answers": Cell(words, kept),
        "Cost": Cell(change(figures.perplexity_increase), figures.perplexity_increase),
        "Bits": Cell(number(figures.bits_per_element, ".2f"), figures.bits_per_element),
        "Size": Cell(UNKNOWN) if size is None else Cell(f"{size / 1e6:,.1f} MB", size),
        "Date": Cell(date or UNKNOWN, date),
    }


def copy_links(loaded: LoadedIndex, entry: Entry, copy: Copy) -> dict[str, str]:
    """Where one copy of an entry can be read: its card and its report, or else its repository."""
    hub = HUBS[copy.hub]
    revision = loaded.revision_of(copy) or hub.main

    def address(template: str, path: str = "") -> str:
        # Quoted, because names may have letters of any script.
        parts = {"repo": copy.repo, "revision": revision, "path": path}
        return template.format(**{name: quote(part) for name, part in parts.items()})

    links = {}
    if CARD in entry.files:
        links["card"] = address(hub.file_page, copy.path_of(CARD))
    if REPORT in entry.files:
        links["report"] = address(hub.file, copy.path_of(REPORT))
    return links or {"repository": address(hub.repo_page)}


def pull_command(loaded: LoadedIndex, entry: Entry, place: list[str]) -> str | None:
    """The command that fetches an entry; None for one that is only listed. `place` as for
    `make_row`."""
    if not entry.pullable:
        return None
    words = ["rotationzoo", "pull", entry.model, "--recipe", entry.recipe]
    if entry.rope_scaling:
        words += ["--rope-scaling", entry.rope_scaling]
    named = attrgetter("model", "recipe", "rope_scaling")
    alike = [other for other in loaded.content.entries if named(other) == named(entry)]
    if len(alike) > 1 and entry.model_revision:
        words += ["--revision", entry.model_revision]
    return shlex.join([*words, *place])
