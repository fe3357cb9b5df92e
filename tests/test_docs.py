"""The examples in the README, the documents and the package are true: they are run, offline, on the
model that comes with it."""

import doctest
import importlib
from pathlib import Path

import pytest
from support.places import ROOT

FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WITH_EXAMPLES = [page for page in PAGES if ">>> " in page.read_text(encoding="utf-8")]
# It calibrates and evaluates several times.
EXAMPLES = [
    pytest.param(page, marks=[pytest.mark.thorough] * (page.name == "python.md"), id=page.name)
    for page in WITH_EXAMPLES
]
MODULES = [
    path
    for path in sorted((ROOT / "rotationzoo").rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


def test_examples_are_where_a_reader_looks_for_them():
    assert {page.name for page in WITH_EXAMPLES} >= {"python.md"}


@pytest.mark.parametrize("page", EXAMPLES)
def test_the_examples_of_a_page(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    failed, tried = doctest.testfile(str(page), module_relative=False, optionflags=FLAGS)
    assert tried
    assert not failed


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_examples_of_a_module(path: Path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    failed, tried = doctest.testmod(importlib.import_module(name), optionflags=FLAGS)
    assert tried
    assert not failed
