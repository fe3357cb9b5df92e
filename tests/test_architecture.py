"""docs/architecture.md shows the packages in the order that is enforced, and what documents name
exists."""

import importlib
import re
from itertools import pairwise

import pytest
from support.places import ROOT
from write_architecture import PACKAGE, PAGE, first_sentence, order, page, rooms

TEXT = PAGE.read_text("utf-8")
DOCUMENTS = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
# A path from the root of the repository, as documents write it.
NAMED = re.compile(
    r"`((?:rotationzoo|tests|scripts|configs|docs|\.github)/[\w./-]+\.\w+)(?:::\w+)?`"
)


# A module or a package inside one, as docs/architecture.md and CONTRIBUTING.md write it.
ROOM = re.compile(rf"`((?:{'|'.join(order())})/[\w/]+)`")


def test_the_page_lists_what_there_is():
    assert page(TEXT) == TEXT, "run: make docs"


def test_the_picture_has_every_package_on_a_floor_above_what_it_imports():
    picture = TEXT.split("```text\n")[1].split("```")[0]
    floors = [re.findall(r"\w+", line.split("|")[0]) for line in picture.splitlines()]
    names = [name for floor in reversed(floors) for name in floor]
    assert sorted(names) == sorted(set(order()) - {"__main__"})
    places = [[order().index(name) for name in floor] for floor in reversed(floors)]
    for lower, upper in pairwise(filter(None, places)):
        assert max(lower) < min(upper)


def test_every_module_says_what_it_holds():
    silent = [name for name, path in rooms() if not first_sentence(path)]
    assert not silent, f"a docstring is missing in {', '.join(silent)}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_files_and_modules_that_a_document_names_exist(path):
    text = path.read_text("utf-8")
    assert not {name for name in NAMED.findall(text) if not (ROOT / name).exists()}
    rooms = {PACKAGE / name.rstrip("/") for name in ROOM.findall(text)}
    assert not {path for path in rooms if not (path.is_dir() or path.with_suffix(".py").is_file())}


def test_the_questions_of_contributing_lead_to_what_they_name():
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    rows = re.findall(r"^\| .*\? \| `([\w/]+)` \| `(\w+)` \|$", text, re.MULTILINE)
    assert len(rows) == text.count("? | ") >= 15
    for room, name in rows:
        module = importlib.import_module(f"rotationzoo.{room.replace('/', '.')}")
        assert hasattr(module, name), f"{room} has no {name}"
