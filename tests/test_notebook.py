"""The notebook of the documentation runs as it is stored, and shows what it says."""

import asyncio
import re

import nbformat
import pytest
from nbclient import NotebookClient
from support.places import ROOT

pytestmark = pytest.mark.thorough

STORED = ROOT / "docs" / "notebook.ipynb"


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    """The notebook after a run in an empty folder, in a process of its own without a network."""
    read = nbformat.read(STORED, as_version=4)
    folder = tmp_path_factory.mktemp("notebook")
    client = NotebookClient(read, timeout=300, resources={"metadata": {"path": str(folder)}})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(folder / "ipython"))
        patch.setenv("JUPYTER_RUNTIME_DIR", str(folder / "runtime"))
        asyncio.run(client.async_execute())
    return read


def printed(notebook, begins: str) -> str:
    (cell,) = (
        cell for cell in notebook.cells if cell.cell_type == "code" and begins in cell.source
    )
    return "".join(output.get("text", "") for output in cell.outputs if output.name == "stdout")


def test_it_is_stored_without_outputs():
    stored = nbformat.read(STORED, as_version=4)
    nbformat.validate(stored)
    for cell in stored.cells:
        if cell.cell_type == "code":
            assert (cell.outputs, cell.execution_count) == ([], None)


def test_every_cache_is_asked_what_the_exact_model_answers(notebook):
    table = printed(notebook, "evaluate(")
    rows = dict(re.findall(r"^(.+?)  +(\d+) of 16 ", table, re.MULTILINE))
    assert rows.keys() == {
        "the exact model", "demo", "demo+feedback", "identity", "hadamard", "random", "kivi",
        "hadamard+feedback",
    }  # fmt: skip
    # 16, 15, 14 and 3 were measured.
    assert int(rows["the exact model"]) >= 15
    assert min(int(rows["demo"]), int(rows["demo+feedback"])) > int(rows["identity"])


def test_the_model_writes_the_hidden_statement(notebook):
    text = printed(notebook, "RotatedCache(")
    (written,) = re.findall(r"the model writes +'(.*)'", text)
    (hidden,) = re.findall(r"the hidden statement +'(.*)'", text)
    assert written == hidden
    (times,) = re.findall(r"the cache is ([\d.]+) times smaller", text)
    assert float(times) > 1.9  # 2.1: exact tokens are in float32 here
