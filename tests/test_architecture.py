"""docs/architecture.md lists the modules that there are, and what documents name exists."""

import re

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


def test_every_module_says_what_it_holds():
    silent = [name for name, path in rooms() if not first_sentence(path)]
    assert not silent, f"a docstring is missing in {', '.join(silent)}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_files_and_modules_that_a_document_names_exist(path):
    text = path.read_text("utf-8")
    assert not {name for name in NAMED.findall(text) if not (ROOT / name).exists()}
    rooms = {PACKAGE / name.rstrip("/") for name in ROOM.findall(text)}
    assert not {path for path in rooms if not (path.is_dir() or path.with_suffix(".py").is_file())}
