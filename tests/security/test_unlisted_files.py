"""Entries of an artifact's folder that nobody vouches for: neither the manifest lists them, nor are
they what every artifact has."""

import os
from pathlib import Path

import pytest
from support.published import ZOO, ok, refused

from rotationzoo import pull
from rotationzoo.errors import RotationZooError


@pytest.fixture
def signed(zoo, made, keys) -> Path:
    """The folder of an artifact that was pulled, with its signature."""
    ok(zoo.run("push", made, ZOO, "--sign", keys.ours, "--json"))
    return Path(ok(zoo.run("pull", "demo", "--repo", ZOO, "--json"))["path"])


def plant_link(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/etc/hostname")


ENTRIES = {
    "code": ("evil.py", lambda path: path.write_text("import os\n")),
    "hidden": (".env", lambda path: path.write_text("TOKEN=1\n")),
    "of an engine": ("tokenizer_config.json", lambda path: path.write_text("{}")),
    "a page that nothing wrote": ("report.html", lambda path: path.write_text("<script></script>")),
    "a folder": ("__pycache__", lambda path: path.mkdir()),
    "a link": ("more", plant_link),
    "a FIFO": ("pipe", os.mkfifo),
    "an escape": ("\x1b[2Jx", lambda path: path.write_text("")),
    "a card that is a link": ("README.md", plant_link),
}


@pytest.mark.hostile("link")
@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_that_nobody_listed_is_a_problem(zoo, signed, keys, entry):
    """Also beside a signature that holds: it is for other files."""
    words = ["verify", signed, "--signer", keys.public, "--require-signature"]
    assert ok(zoo.run(*words, "--json"))["ok"]
    name, plant = ENTRIES[entry]
    plant(signed / name)
    result = zoo.run(*words)
    assert result.returncode == 1
    shown = name.replace("\x1b", "\\x1b")
    assert f"Problem: {shown} is not " in result.stdout
    assert "\x1b" not in result.stdout
    assert "is sound" not in result.stdout
    assert "not to be used: 1 problem" in result.stderr


@pytest.mark.hostile("hub")
def test_pull_does_not_hand_over_a_folder_with_more_than_the_index_lists(zoo, signed, keys):
    (signed / "evil.py").write_text("import os\n")
    words = ["--repo", ZOO, "--signer", keys.public, "--require-signature"]
    text = refused(zoo.run("pull", "demo", *words))
    assert "evil.py" in text
    with pytest.raises(RotationZooError, match=r"evil\.py"):
        pull("demo", repo=ZOO, hub="huggingface", signers=[str(keys.public)])
    (signed / "evil.py").unlink()
    ok(zoo.run("pull", "demo", *words, "--json"))


@pytest.mark.hostile("hub")
@pytest.mark.parametrize("command", ["push", "export"])
def test_nor_is_it_published_or_exported(zoo, signed, keys, command):
    (signed / "evil.py").write_text("import os\n")
    more = [f"{ZOO}-copy"] if command == "push" else ["--to", "sglang"]
    assert "evil.py is not in the manifest" in refused(zoo.run(command, signed, *more))
