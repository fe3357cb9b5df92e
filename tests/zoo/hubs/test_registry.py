"""A hub is listed once: a row, and a module."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.hubs import folder
from support.places import ROOT
from support.published import ZOO, ok

from rotationzoo.artifact.store import Artifact
from rotationzoo.checks.verify import verify
from rotationzoo.zoo import index
from rotationzoo.zoo.hubs.protocol import HUBS, Hub, open_hub


@pytest.fixture
def with_folder_hub(command):
    """The command line in a process of its own that has a third hub."""
    variables = command.environment | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}

    def run(*words) -> dict:
        start = [sys.executable, folder.__file__, *map(str, words), "--json"]
        options = dict(cwd=command.folder, env=variables, capture_output=True, text=True)
        return ok(subprocess.run(start, **options))

    return run


@pytest.mark.thorough
def test_a_new_hub_takes_a_module_and_a_row(with_folder_hub, command, made):
    tag = with_folder_hub("push", made, ZOO, "--to", "folder")["hubs"]["folder"]["revision"]
    content = command.folder / "hub" / ZOO / tag / index.NAME
    assert '"hub": "folder"' in content.read_text()
    words = ["pull", "demo", "--repo", ZOO, "--from", "folder", "--local-dir", "here"]
    pulled = with_folder_hub(*words)
    assert (pulled["hub"], pulled["revision"]) == ("folder", tag)
    assert verify(Artifact.open(command.folder / "here"), "demo").ok


@pytest.mark.parametrize("name", HUBS)
def test_each_hub_is_one_and_is_documented(zoo, name):
    assert isinstance(open_hub(name), Hub)
    assert HUBS[name].title in Path(ROOT, "docs", "zoo.md").read_text(encoding="utf-8")
