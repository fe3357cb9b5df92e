"""Entries of an artifact's folder that neither its manifest nor a hub's client accounts for."""

import os
import pickle
import shutil
from pathlib import Path

import huggingface_hub
import pytest
from support.published import ZOO, ok, refused

from rotationzoo import pull
from rotationzoo.artifact.store import SIGNATURE, Artifact
from rotationzoo.errors import RotationZooError
from rotationzoo.zoo.hubs.protocol import open_hub
from rotationzoo.zoo.signing import SigningTool


@pytest.fixture
def signed(zoo, made, keys) -> Path:
    """The folder of an artifact that was pulled, with its signature."""
    ok(zoo.run("push", made, ZOO, "--sign", keys.ours, "--json"))
    return Path(ok(zoo.run("pull", "demo", "--repo", ZOO, "--json"))["path"])


def plant_link(path: Path, target: str = "/etc/hostname") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def plant_below(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_text("import os\n")


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
    "in a hub's folder": (".cache/evil.py", plant_below),
    "deep in it": (".cache/huggingface/download/evil.py", plant_below),
    "below a folder there": (".cache/huggingface/download/x/y.metadata", plant_below),
    "a folder's link in it": (".cache/huggingface", lambda path: plant_link(path, "/etc")),
    "a hub's folder that is a link": (".cache", plant_link),
    "in the other hub's folder": ("._____temp/evil.py", plant_below),
    "a hub's file that is a link": (".gitattributes", plant_link),
    "a hub's file that is a FIFO": (".mv", os.mkfifo),
    "a pickle of an earlier client": (".msc", lambda path: path.write_bytes(pickle.dumps([]))),
}


@pytest.mark.hostile("link")
@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_that_nobody_listed_is_a_problem(inside, made, tmp_path, keys, entry):
    """Even next to a valid signature, which is for other files."""
    folder = Path(shutil.copytree(made, tmp_path / "signed"))
    names = ("manifest.json", *Artifact.open(folder).content["files"])
    sign = SigningTool(keys.ours).sign
    (folder / SIGNATURE).write_bytes(sign({name: folder / name for name in names}, "it")[0])
    name, plant = ENTRIES[entry]
    plant(folder / name)
    result = inside("verify", folder, "--signer", keys.public, "--require-signature")
    assert result.returncode == 1
    shown = name.replace("\x1b", "\\x1b")
    assert f"Problem: {shown} is not " in result.stdout
    assert "\x1b" not in result.stdout
    assert "is sound" not in result.stdout
    assert "must not be used: 1 problem" in result.stderr


def test_what_the_clients_of_hubs_leave_is_no_problem(zoo, signed, keys, tmp_path):
    """An artifact at the top of a repository, which the hubs' own clients download."""
    files = {path.name: path.read_bytes() for path in signed.iterdir()}
    for hub in (zoo.hf, zoo.ms):
        hub.create("someone/one")
        hub.commit("someone/one", files | {".gitattributes": b"* text=auto\n"})
    hf, ms = tmp_path / "hf", tmp_path / "ms"
    huggingface_hub.snapshot_download("someone/one", local_dir=hf, endpoint=zoo.hf.endpoint)
    (hf / ".cache/huggingface/download/x.1f.incomplete").touch()  # of a stopped download
    open_hub("modelscope").api.download_repo("someone/one", "model", local_dir=ms)
    # What earlier versions of the second client leave.
    (ms / ".mv").write_text("Revision:master,CreatedAt:1700000000")
    (ms / "._____temp").mkdir()
    assert len(list((hf / ".cache").rglob("*.metadata"))) == len(files) + 1
    words = ["--signer", keys.public, "--require-signature"]
    for folder in (hf, ms):
        assert (folder / ".gitattributes").is_file()
        assert ok(zoo.run("verify", folder, *words, "--json"))["ok"]
        ok(zoo.run("export", folder, "--to", "sglang", "--output", tmp_path / "out", "--json"))
        shutil.rmtree(tmp_path / "out")


@pytest.mark.hostile("hub")
def test_a_folder_with_more_than_the_index_lists_is_not_handed_over(zoo, signed, keys):
    (signed / "evil.py").write_text("import os\n")
    words = ["--repo", ZOO, "--signer", keys.public, "--require-signature"]
    assert "evil.py" in refused(zoo.run("pull", "demo", *words))
    with pytest.raises(RotationZooError, match=r"evil\.py"):
        pull("demo", repo=ZOO, hub="huggingface", signers=[str(keys.public)])
    for command, *more in (("push", f"{ZOO}-copy"), ("export", "--to", "sglang")):
        assert "evil.py is not in the manifest" in refused(zoo.run(command, signed, *more))
    (signed / "evil.py").unlink()
    ok(zoo.run("pull", "demo", *words, "--json"))
