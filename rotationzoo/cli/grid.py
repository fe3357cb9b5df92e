"""Tables that fit a terminal: names are folded, and what is still too wide becomes several tables.
Numbers are never cut or folded."""

from collections.abc import Collection

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

_GAP = 2  # columns between two columns of a table
_NAME = 16  # columns that a folded column keeps


def build_grids(
    columns: list[str], rows: list[list[str]], width: int | None, folded: Collection[str] = ()
) -> list[Table]:
    """The table as grids of at most `width` columns; None: as one grid, however wide.

    Every grid has the first column, which holds the names of the rows. It may be folded, and so may
    the columns whose titles are in `folded`. All of these are left-aligned. Cells must hold no
    control characters.
    """
    widths = [max(map(cell_len, cells)) for cells in zip(columns, *rows, strict=True)]
    words = [number == 0 or title in folded for number, title in enumerate(columns)]
    groups = [list(range(len(columns)))]
    if width is not None:
        widths = _fold(widths, words, width)
        groups = _split(widths, width)
    grids = []
    for group in groups:
        grid = Table(box=None, pad_edge=False, show_edge=False)
        for number in group:
            grid.add_column(
                Text(columns[number]),
                justify="left" if words[number] else "right",
                overflow="fold",
                no_wrap=not words[number],
                width=widths[number],
            )
        for row in rows:
            # `Text` keeps rich from reading markup in names: a folder may be called [bold].
            cells = [Text(row[number]) for number in group]
            grid.add_row(*cells)
        grids.append(grid)
    return grids


def total_width(widths: list[int]) -> int:
    """The width of a table with columns of these widths."""
    return sum(widths) + _GAP * (len(widths) - 1)


def _fold(widths: list[int], words: list[bool], width: int) -> list[int]:
    """Narrow the widest columns of words until the table fits, or none is wider than `_NAME`."""
    narrowed = list(widths)
    while (excess := total_width(narrowed) - width) > 0:
        widest = max((size, number) for number, size in enumerate(narrowed) if words[number])
        if widest[0] <= _NAME:
            break
        narrowed[widest[1]] = max(_NAME, widest[0] - excess)
    return narrowed


def _split(widths: list[int], width: int) -> list[list[int]]:
    """Numbers of columns in groups that fit: each begins with the first column, and has at least
    one other."""
    groups = [[0]]
    for number in range(1, len(widths)):
        taken = [widths[each] for each in (*groups[-1], number)]
        if len(groups[-1]) > 1 and total_width(taken) > width:
            groups.append([0])
        groups[-1].append(number)
    return groups
