"""`rotationzoo list`: show the rotations that have been published."""

from typing import TYPE_CHECKING

from rotationzoo.cli.output import Output, say, table
from rotationzoo.settings import IndexPlace, ZooRepo
from rotationzoo.settings_base import argument, option
from rotationzoo.words import UNKNOWN, change, counted, number
from rotationzoo.zoo.hubs.protocol import DEFAULT_HUB, HUB_NAMES, HUBS, HubName, chosen_hubs

if TYPE_CHECKING:
    from rotationzoo.zoo.index import Entry
    from rotationzoo.zoo.lookup import LoadedIndex

_FORMATS = {"rotationzoo": "artifact", "oscar": "pair"}


def list_command(
    out: Output,
    model: str | None = argument("Only models with this in their name.", None),
    recipe: str | None = option("Only this recipe."),
    from_: HubName = option("The hub whose index is read.", "--from", default=DEFAULT_HUB),
    index: IndexPlace = None,
    repo: ZooRepo = None,
) -> None:
    """Show the rotations that have been published.

    rotationzoo list qwen3
    """
    from rotationzoo.zoo.lookup import find_index

    zoo_index = find_index(index, repo, chosen_hubs(from_, repo)[0])
    out.note(f"Read {zoo_index.origin}")
    part, entries = (model or "").lower(), zoo_index.content.entries
    entries = [entry for entry in entries if part in entry.model.lower()]
    entries = [entry for entry in entries if recipe in (None, entry.recipe)]
    show_list(out, entries)
    place = place_options(index, repo, zoo_index)
    out.suggest(*(["pull", entries[0].model, *place] if entries else ["calibrate", "MODEL"]))


def place_options(index: str | None, repo: str | None, read: "LoadedIndex") -> list[str]:
    """The options with which other commands read the same index."""
    named = {"--index": index, "--repo": None if index else repo}
    named["--from"] = read.hub if read.hub in HUB_NAMES[1:] else None
    return [word for name, value in named.items() if value for word in (name, value)]


def show_list(out: Output, entries: list["Entry"]) -> None:
    """Print the entries of an index."""
    names = dict.fromkeys(entry.model for entry in entries)
    data = {"entries": [entry.model_dump() for entry in entries]}
    out.result(data, "\n".join(names), lambda: _show_entries(entries))


def _show_entries(entries: list["Entry"]) -> None:
    if not entries:
        say("No published rotations match; without a name and --recipe, list shows all of them")
        return
    columns = ["model", "recipe", "files", "bits", "keeps", "measured", "cost", "revision", "hubs"]
    rows = [_row(entry, entries) for entry in entries]
    # A footnote with the folder tells equal rows apart.
    equal = [place for place, row in enumerate(rows) if rows.count(row) > 1]
    for footnote, place in enumerate(equal, 1):
        rows[place][1] += f" ({footnote})"
    told = [cells for cells in zip(columns, *rows, strict=True) if {*cells[1:]} != {UNKNOWN}]
    columns, *rows = map(list, zip(*told, strict=True))
    table(counted(len(entries), "published rotation"), columns, rows, folded=["recipe"])
    for footnote, place in enumerate(equal, 1):
        say(f"({footnote}) from the folder {entries[place].copies[0].path}")


def _row(entry: "Entry", entries: list["Entry"]) -> list[str]:
    from rotationzoo.zoo.index import Listed, kept_words

    measured, decision, figures = entry.measured, entry.decision, entry.summary or Listed()
    bits = number((decision and decision.bits) or figures.bits_per_element, ".2f")
    hubs = {HUBS[copy.hub].abbreviation for copy in entry.copies}
    return [
        *(entry.model, entry.recipe, _FORMATS[entry.format], bits, kept_words(entry, entries)),
        "no" if measured is None else measured.engine or "yes",
        change(figures.perplexity_increase),
        *((entry.model_revision or UNKNOWN)[:8], "+".join(sorted(hubs))),
    ]
