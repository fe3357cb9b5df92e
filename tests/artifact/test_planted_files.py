"""Folders from strangers: links, and names that lead out of the folder."""

import contextlib
import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.command_line import READERS, edited_manifest, put_file, refused, succeeded

from rotationzoo.artifact.store import Artifact
from rotationzoo.checks.verify import verify
from rotationzoo.errors import RotationZooError
from rotationzoo.storage import files, folders
from rotationzoo.writer import add_files, check_writable
from rotationzoo.zoo import index
from rotationzoo.zoo.push import prepare_upload


@pytest.fixture
def docs(tmp_path) -> SimpleNamespace:
    """The target of a link, which must not change."""
    place = tmp_path / "docs"
    place.mkdir()
    (place / "thesis.tex").write_text("years of work")
    whole = lambda: [path.read_text() for path in place.iterdir()] == ["years of work"]  # noqa: E731
    return SimpleNamespace(folder=place, file=place / "thesis.tex", whole=whole)


@pytest.mark.hostile("link")
@pytest.mark.parametrize("name", ["partial", "old"])
@pytest.mark.parametrize("to_file", [False, True])
def test_calibrate_follows_no_link_beside_its_output(inside, docs, name, to_file):
    link = inside.folder / f"rotations/.demo-hadamard.{name}"
    link.parent.mkdir()
    link.symlink_to(docs.file if to_file else docs.folder)
    succeeded(inside("calibrate", "demo", "--recipe", "hadamard"))
    assert docs.whole()
    assert verify(Artifact.open(inside.folder / "rotations/demo-hadamard")).ok


@pytest.mark.hostile("link")
@pytest.mark.parametrize(
    "name", ["{}", "{}.checkpoint.safetensors", ".{}.lock", ".{}.checkpoint.safetensors.lock"]
)
def test_a_link_in_the_place_of_an_output_or_a_lock_is_refused(inside, docs, name):
    (docs.folder / "empty").mkdir()
    link = inside.folder / "rotations" / name.format("demo-hadamard")
    link.parent.mkdir()
    link.symlink_to(docs.file if "." in name else docs.folder / "empty")
    assert "symbolic link" in refused(inside("calibrate", "demo", "--recipe", "hadamard"))
    (docs.folder / "empty").rmdir()
    assert docs.whole()


def test_a_link_that_the_user_names_is_followed(inside, tmp_path):
    """So are links in parent folders."""
    (tmp_path / "disk").mkdir()
    (inside.folder / "there").symlink_to(tmp_path / "disk" / "mine")
    (inside.folder / "rotations").symlink_to(tmp_path / "disk")
    assert inside("calibrate", "demo", "--recipe", "hadamard", "-o", "there").returncode == 0
    assert inside("calibrate", "demo", "--recipe", "hadamard").returncode == 0
    assert {path.name for path in (tmp_path / "disk").iterdir()} == {"mine", "demo-hadamard"}
    assert (inside.folder / "there").is_symlink()


@pytest.mark.hostile("link")
@pytest.mark.parametrize(
    "name",
    [".README.md.partial", ".probe.partial", ".manifest.json.partial", "README.md", "answers.png"],
)
def test_adding_to_an_artifact_writes_through_no_link(folder, docs, name):
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(docs.file)
    artifact = Artifact.open(folder)
    check_writable(artifact)
    add_files(artifact, {"answers.png": b"a picture"}, {})
    assert docs.whole()
    problems = verify(Artifact.open(folder)).problems
    assert [problem.split()[0] for problem in problems] == [name] * name.startswith(".")


@pytest.mark.hostile("link")
@pytest.mark.parametrize(
    "name",
    ["out/k_rotation_oscar2_center.pt", ".out.partial", ".out.old", "out/.oscar_0.pending.json"],
)
def test_an_export_writes_through_no_link(inside, folder, docs, name):
    words = ("export", folder, "--to", "sglang", "-o", "out")
    assert inside(*words).returncode == 0
    (inside.folder / name).unlink(missing_ok=True)
    (inside.folder / name).symlink_to(docs.folder if name.startswith(".out") else docs.file)
    done = inside(*words)
    assert docs.whole()
    if name.endswith(".pt"):
        assert f"holds other files: {Path(name).name}" in refused(done)
        return
    assert done.returncode == 0
    assert not (inside.folder / "out/k_rotation_oscar2_center.pt").is_symlink()


@pytest.mark.hostile("link")
def test_an_index_is_written_through_no_link(tmp_path, docs):
    (tmp_path / "zoo_index.json.partial").symlink_to(docs.file)
    folders.replace_file(tmp_path / "zoo_index.json", b"{}")
    assert docs.whole()
    assert (tmp_path / "zoo_index.json").read_bytes() == b"{}"


@pytest.mark.hostile("link")
@pytest.mark.parametrize(
    "name", ["rotations.safetensors", "statistics.safetensors", "manifest.json"]
)
def test_what_is_a_link_is_neither_verified_nor_published(inside, folder, tmp_path, name):
    """Even a link to the same bytes, which may change at any moment."""
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    assert f"{name} " in inside("verify", folder).stdout + refused(inside("verify", folder))
    assert "symbolic link" in refused(inside("push", folder, "me/zoo", "--dry-run"))


@pytest.mark.hostile("link")
def test_a_card_that_is_published_is_made_anew(folder, tmp_path):
    (folder / "README.md").write_text("a private key")
    upload = prepare_upload(Artifact.open(folder), "me/zoo")
    assert upload.files["README.md"].startswith(b"---\nlibrary_name: rotationzoo")
    assert b"private" not in upload.files["README.md"]
    (folder / "README.md").unlink()
    (folder / "README.md").symlink_to(tmp_path / "id_ed25519")
    with pytest.raises(RotationZooError, match=r"README\.md is not a file"):
        prepare_upload(Artifact.open(folder), "me/zoo")


OUTSIDE = (
    "../x", "/etc/passwd", "a/../../x", "a\\b", "a//b", "", ".", "..", ".git", "a/.ssh/b", "a\nb",
    "x" * 300, "a\0b",
)  # fmt: skip


@pytest.mark.hostile("path")
@pytest.mark.parametrize("name", OUTSIDE)
def test_no_name_leads_out_of_its_folder(tmp_path, name):
    with pytest.raises(RotationZooError, match="is not a path inside a folder"):
        files.child(tmp_path, name)
    assert files.child(tmp_path, "Qwen__Qwen3-8B/oscar-0123/k_rotation.pt").is_relative_to(tmp_path)


@pytest.mark.hostile("path")
def test_a_folder_inside_that_is_a_link_leads_nowhere(tmp_path, docs):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "sub").symlink_to(docs.folder)
    with pytest.raises(RotationZooError, match="leads out of its folder"):
        files.child(tmp_path / "folder", "sub/thesis.tex")


@pytest.mark.hostile("path")
@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("where", ["recipe", "revision", "path", "file", "model"])
def test_an_index_that_leads_elsewhere_is_refused(where, name):
    copy = {"hub": "huggingface", "repo": "a/b", "path": "c", "revision": "0" * 40}
    entry = {"model": "demo", "recipe": "oscar", "copies": [copy], "files": {}}
    names = {"rotations.safetensors": {"size": 1, "sha256": "0" * 64}}
    if where == "file":
        names[name] = {"size": 1, "sha256": "0" * 64}
    elif where in ("revision", "path"):
        copy[where] = name
    else:
        entry[where] = name
    content = json.dumps({"schema": 1, "entries": [{**entry, "files": names}]})
    with pytest.raises(RotationZooError, match=r"an index is damaged: entries\.0"):
        index.parse(content, "an index")


@pytest.mark.hostile("path")
@pytest.mark.parametrize("name", ["../../secret", "/etc/hostname", ".git"])
def test_a_manifest_names_files_of_its_own_folder_alone(inside, folder, name):
    secret = folder.parent.parent / "secret"
    secret.write_text("")
    with edited_manifest(folder) as content:
        content["files"][name] = {"size": 0, "sha256": files.digest(b"")}
    assert "is damaged: files." in refused(inside("verify", folder))
    (folder / ".git").mkdir()
    assert "is damaged: files." in refused(
        inside("calibrate", "demo", "--recipe", "hadamard", "-o", folder, "--restart")
    )
    assert (folder / ".git").is_dir()


@pytest.mark.hostile("path")
def test_restart_replaces_no_file_that_is_no_part_of_an_artifact(inside, folder):
    """Even if the manifest lists it."""
    put_file(folder, "thesis.tex", b"years of work")
    says = refused(inside("calibrate", "demo", "--recipe", "hadamard", "-o", folder, "--restart"))
    assert "also holds thesis.tex, which is not part of an artifact" in says
    assert (folder / "thesis.tex").read_text() == "years of work"


@pytest.mark.hostile("path")
def test_an_export_keeps_what_it_did_not_write(inside, folder):
    words = ("export", folder, "--to", "vllm-oscar", "--pooled", "--windows", "0/0", "-o", "out")
    assert inside(*words).returncode == 0
    out = inside.folder / "out"
    (out / "notes").mkdir()
    (out / "notes" / "a.txt").write_text("mine")
    (out / "main.py").write_text("mine too")
    record = json.loads((out / "export.json").read_text())
    record["files"] |= {"main.py": "0" * 64, "notes": "0" * 64, "../x": "0" * 64}
    (out / "export.json").write_text(json.dumps(record))
    assert "out exists and holds other files: main.py" in refused(inside(*words))
    assert (out / "notes" / "a.txt").read_text() + (out / "main.py").read_text() == "minemine too"


def bind_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one, contextlib.chdir(path.parent):
        one.bind(path.name)  # a socket's path is at most 107 bytes long


SPECIAL = {
    "pipe": os.mkfifo,
    "socket": bind_socket,
    "folder": Path.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "loop": lambda path: path.symlink_to(path.name),
}
KINDS = [pytest.param(kind, marks=pytest.mark.hostile("link")) for kind in SPECIAL]


def special(path: Path, kind: str) -> None:
    """Put a pipe, a device and so on in the place of a file."""
    path.unlink(missing_ok=True)
    SPECIAL[kind](path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", ["manifest.json", "rotations.safetensors", "statistics.safetensors"]
)
def test_nothing_waits_for_a_pipe_or_reads_a_device(inside, folder, name, kind):
    special(folder / name, kind)
    for word, *more in (*READERS, ("report",)):
        only_rotations = word in ("inspect", "report")
        if name != "statistics.safetensors" or not only_rotations:
            assert refused(inside(word, folder, *more))


@pytest.mark.parametrize("kind", KINDS)
def test_an_evaluation_a_checkpoint_and_an_index_that_are_no_files(inside, folder, kind):
    put_file(folder, "evaluation.json", b"{}")
    special(folder / "evaluation.json", kind)
    assert "evaluation.json" in refused(inside("report", folder))
    (inside.folder / "rotations").mkdir()
    special(inside.folder / "rotations" / "demo-hadamard.checkpoint.safetensors", kind)
    assert "checkpoint" in refused(inside("calibrate", "demo", "--recipe", "hadamard"))
    special(inside.folder / "zoo_index.json", kind)
    named = "/dev/zero" if kind == "device" else "zoo_index.json"
    assert named in refused(inside("list", "--index", "zoo_index.json"))


@pytest.mark.hostile("path")
@pytest.mark.parametrize(
    "shards",
    [{"a": "../secret.safetensors"}, {"a": "/etc/hostname"}, {"a": {"b": 1}}, {"a": None},
     [], "x", 3],
)  # fmt: skip
def test_an_index_of_shards_names_files_of_its_folder(inside, copied_tiny, shards):
    model = copied_tiny
    (model.parent / "secret.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    refused(inside("calibrate", model, "--tokens", "1024", "--length", "256"))
    assert not (inside.folder / "rotations").exists()
