"""Files of an artifact that are damaged, or lie: every command says so in one sentence, before it
computes anything."""

import json
import struct

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file
from support.command_line import (
    READERS,
    SMALL_RECIPE,
    all_refuse,
    edited_manifest,
    put_file,
    refused,
)
from support.jobs import interrupt_after

from rotationzoo.artifact.store import Artifact
from rotationzoo.calibration.calibrate import calibrate
from rotationzoo.calibration.plan import Job
from rotationzoo.checks.verify import verify
from rotationzoo.errors import RotationZooError

# ---- sizes


@pytest.mark.hostile("size")
@pytest.mark.parametrize("name", ["manifest.json", "zoo_index.json"])
def test_json_of_a_terabyte_is_not_read(inside, folder, name):
    """Sparse: it takes no room on the disk, and would take all of the memory."""
    with (folder / name).open("wb") as file:
        file.truncate(1 << 40)
    words = ("list", "--index", folder / name) if name == "zoo_index.json" else ("verify", folder)
    assert "has 1,099,511,627,776 bytes, and no such file has more" in refused(inside(*words))


@pytest.mark.hostile("size")
@pytest.mark.parametrize("name", ["rotations", "statistics"])
def test_tensors_of_a_terabyte_are_neither_hashed_nor_read(inside, folder, name):
    path = folder / f"{name}.safetensors"
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    result = inside("verify", folder)
    refused(result)
    assert (
        f"{name}.safetensors is not the file that was written: it has 1099511627776 bytes"
        in result.stdout
    )
    assert "is damaged: " in result.stdout
    assert "Checked:" not in result.stdout, "nothing else could be"


@pytest.mark.hostile("size")
@pytest.mark.parametrize("size", [0, 1, 10**18])
def test_a_manifest_that_lies_about_a_size(inside, folder, size):
    with edited_manifest(folder) as content:
        content["files"]["rotations.safetensors"]["size"] = size
    result = inside("verify", folder)
    refused(result)
    assert f"bytes, not {size}" in result.stdout


KEY = "layers.0.key.rotation"


def header(*shape: int, names=(KEY,), dtype: str = "F32") -> bytes:
    """A file whose header says that tensors of this shape are all in its only 64 bytes."""
    entry = {"dtype": dtype, "shape": shape, "data_offsets": [0, 64]}
    text = json.dumps(dict.fromkeys(names, entry)).encode()
    return struct.pack("<Q", len(text)) + text + bytes(64)


HEADERS = {
    "more elements than bytes": header(1 << 40),
    "an overflow": header(1 << 32, 1 << 32),
    "a header of 2^60": struct.pack("<Q", 1 << 60) + b"{}",
    "two on one place": header(16, names=("a", "b")),
    "a type that no artifact has": header(64, names=("a",), dtype="U8"),
    "a name of 1 MB": header(16, names=("x" * (1 << 20),)),
}


@pytest.mark.hostile("size")
@pytest.mark.parametrize("data", HEADERS.values(), ids=HEADERS)
def test_a_header_that_asks_for_more_than_the_file_has(inside, folder, data):
    """safetensors holds shape times type against the size of the file; what it lets through is held
    against the geometry."""
    put_file(folder, "rotations.safetensors", data)
    for says in all_refuse(inside, folder):
        assert len(says) < 2000
    problems = verify(Artifact.open(folder)).problems
    assert len(problems) >= 1
    assert all(len(problem) < 1000 for problem in problems)


# ---- tensors


def without(name):
    return lambda tensors: tensors.pop(name)


def reshaped(name, change):
    return lambda tensors: tensors.update({name: change(tensors[name]).contiguous()})


CHANGES = {
    "no rotation": (without(KEY), "key rotation missing: layer 0"),
    "fewer heads": (reshaped(KEY, lambda t: t[:1]), "of another shape or type"),
    "another dimension": (reshaped(KEY, lambda t: t[:, :8, :8]), "of another shape or type"),
    "float64": (reshaped(KEY, lambda t: t.double()), "of another shape or type"),
    "clips for one head": (
        reshaped("layers.0.key.clip", lambda t: t[:1]),
        "key clip of another shape",
    ),
    "one more": (
        lambda tensors: tensors.update({"layers.x.key.rotation": torch.ones(1)}),
        "belong to no layer",
    ),
    "none": (lambda tensors: tensors.clear(), "missing: layers 0, 1"),
    "NaN": (reshaped(KEY, lambda t: t * float("nan")), "key rotation not finite"),
}


@pytest.mark.hostile("values")
@pytest.mark.parametrize(("change", "says"), CHANGES.values(), ids=CHANGES)
def test_tensors_that_are_not_those_of_the_geometry(inside, folder, change, says):
    tensors = load_file(folder / "rotations.safetensors")
    change(tensors)
    put_file(folder, "rotations.safetensors", save(tensors))
    for word, *more in (*READERS, ("validate", "--device", "cpu")):
        result = inside(word, folder, *more)
        assert says in refused(result) + result.stdout, word


def test_a_flipped_bit_that_no_check_of_values_finds(inside, small, folder):
    """The clip ratio stays above 0 and below 1."""
    path = folder / "rotations.safetensors"
    tensors = load_file(path)
    tensors["layers.0.key.clip"].view(torch.int32)[0] ^= 1
    path.write_bytes(save(tensors))
    for words in (["inspect", folder], ["report", folder]):
        says = refused(inside(*words))
        assert "its sha256 differs" in says
        assert f"rotationzoo verify {folder}\n" in says
    assert not (inside.folder / "report.html").exists()
    with pytest.raises(RotationZooError, match="its sha256 differs"):
        _ = Artifact.open(folder).rotations


def test_the_folder_of_artifacts_is_named_instead_of_one(inside, folder):
    says = refused(inside("verify", folder.parent))
    assert f"Hint: name one of those in it, such as {folder}" in says


@pytest.mark.hostile("malformed")
def test_statistics_that_the_manifest_does_not_list_are_nobodys(folder):
    with edited_manifest(folder) as content:
        del content["files"]["statistics.safetensors"]
    assert Artifact.open(folder).statistics is None


# ---- checkpoints


DAMAGES = {
    "no metadata": lambda tensors, told: told.clear(),
    "deep": lambda tensors, told: told.update(done="[" * 50_000),
    "a word for a number": lambda tensors, told: told.update(done='"2"'),
    "less than nothing": lambda tensors, told: told.update(done="-5"),
    "an identity of lists": lambda tensors, told: told.update(identity="[]"),
    "another name": lambda tensors, told: tensors.update({"a.b.c.d": torch.ones(1)}),
    "one less": lambda tensors, told: tensors.popitem(),
    "another shape": lambda tensors, told: tensors.update({"0.query.second": torch.ones(1)}),
}


@pytest.mark.hostile("malformed")
@pytest.mark.parametrize("change", DAMAGES.values(), ids=DAMAGES)
def test_a_checkpoint_that_is_damaged(small, tmp_path, change):
    job = Job(str(small.parent / "tiny"), SMALL_RECIPE, tmp_path / "out", batch=1, device="cpu")
    with pytest.raises(KeyboardInterrupt):
        calibrate(job, interrupt_after(2))
    with safe_open(job.checkpoint, "pt") as file:
        told = dict(file.metadata())
    tensors = load_file(job.checkpoint)
    change(tensors, told)
    save_file(tensors, job.checkpoint, told)
    with pytest.raises(RotationZooError, match=r"the checkpoint .* is damaged") as refusal:
        calibrate(job)
    assert refusal.value.hint == "start afresh with --restart"
