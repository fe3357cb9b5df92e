"""Damaged or forged files of an artifact: every command says so in one sentence, before it computes
anything."""

import json
import struct
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file
from support import command_line
from support.command_line import READERS, all_refuse, edited_manifest, put_file, refused
from support.jobs import interrupt_after
from support.reports import make_evaluation, summary

from rotationzoo.artifact.manifest import parse_manifest
from rotationzoo.artifact.store import Artifact
from rotationzoo.calibration.calibrate import calibrate
from rotationzoo.calibration.plan import Job
from rotationzoo.checks.verify import verify
from rotationzoo.errors import RotationZooError
from rotationzoo.storage import strict_json
from rotationzoo.zoo import index


@pytest.mark.hostile("size")
@pytest.mark.parametrize("name", ["manifest.json", "zoo_index.json"])
def test_json_of_a_terabyte_is_not_read(inside, folder, name):
    """The file is sparse: it uses no disk space, and would fill the memory."""
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
    says = f"{name}.safetensors is not the file that was written: it has 1099511627776 bytes"
    assert says in result.stdout
    assert "is damaged: " in result.stdout
    assert "Checked:" not in result.stdout


@pytest.mark.hostile("size")
@pytest.mark.parametrize("size", [0, 1, 10**18])
def test_a_manifest_that_lies_about_a_size(inside, folder, size):
    with edited_manifest(folder) as content:
        content["files"]["rotations.safetensors"]["size"] = size
    result = inside("verify", folder)
    refused(result)
    assert f"bytes, not {size}" in result.stdout


KEY, CLIP = "layers.0.key.rotation", "layers.0.key.clip"


def header(*shape: int, names=(KEY,), dtype: str = "F32") -> bytes:
    """A file with 64 bytes of data, whose header lists tensors of this shape in them."""
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
    """safetensors compares shapes and types with the size of the file, and we with the geometry."""
    put_file(folder, "rotations.safetensors", data)
    for says in all_refuse(inside, folder):
        assert len(says) < 2000
    problems = verify(Artifact.open(folder)).problems
    assert len(problems) >= 1
    assert all(len(problem) < 1000 for problem in problems)


def reshaped(name, change):
    return lambda tensors: tensors.update({name: change(tensors[name]).contiguous()})


CHANGES = {
    "no rotation": (lambda tensors: tensors.pop(KEY), "key rotation missing: layer 0"),
    "fewer heads": (reshaped(KEY, lambda t: t[:1]), "of another shape or type"),
    "another dimension": (reshaped(KEY, lambda t: t[:, :8, :8]), "of another shape or type"),
    "float64": (reshaped(KEY, lambda t: t.double()), "of another shape or type"),
    "clips for one head": (reshaped(CLIP, lambda t: t[:1]), "key clip of another shape"),
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
    for word, *more in READERS:
        result = inside(word, folder, *more)
        assert says in refused(result) + result.stdout, word


def test_a_flipped_bit_that_no_check_of_values_finds(inside, folder):
    """The clip ratio stays between 0 and 1."""
    path = folder / "rotations.safetensors"
    tensors = load_file(path)
    tensors[CLIP].view(torch.int32)[0] ^= 1
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
    assert f"Hint: name one of the artifacts in it, such as {folder}" in says


@pytest.mark.hostile("malformed")
def test_statistics_that_the_manifest_does_not_list_are_nobodys(folder):
    with edited_manifest(folder) as content:
        del content["files"]["statistics.safetensors"]
    assert Artifact.open(folder).statistics is None


DAMAGES = {
    "no metadata": lambda tensors, told: told.clear(),
    "deep": lambda tensors, told: told.update(done="[" * 50_000),
    "a word for a number": lambda tensors, told: told.update(done='"2"'),
    "less than nothing": lambda tensors, told: told.update(done="-5"),
    "more than there are": lambda tensors, told: told.update(done="1000000"),
    "one more than there are": lambda tensors, told: told.update(done="5"),
    "not finite": lambda tensors, told: tensors["0.query.second"].fill_(float("nan")),
    "an identity of lists": lambda tensors, told: told.update(identity="[]"),
    "another name": lambda tensors, told: tensors.update({"a.b.c.d": torch.ones(1)}),
    "one less": lambda tensors, told: tensors.popitem(),
    "another shape": lambda tensors, told: tensors.update({"0.query.second": torch.ones(1)}),
}


@pytest.fixture(scope="module")
def stopped(small, tmp_path_factory) -> Job:
    output = tmp_path_factory.mktemp("stopped") / "out"
    recipe = command_line.SMALL_RECIPE
    job = Job(str(small.parent / "tiny"), recipe, output, batch=1, device="cpu")
    with pytest.raises(KeyboardInterrupt):
        calibrate(job, interrupt_after(2))
    return job


@pytest.mark.hostile("malformed")
@pytest.mark.parametrize("change", DAMAGES.values(), ids=DAMAGES)
def test_a_checkpoint_that_is_damaged(stopped, tmp_path, change):
    job = replace(stopped, output=tmp_path / "out")
    with safe_open(stopped.checkpoint, "pt") as file:
        told = dict(file.metadata())
    tensors = load_file(stopped.checkpoint)
    change(tensors, told)
    save_file(tensors, job.checkpoint, told)
    with pytest.raises(RotationZooError, match=r"the checkpoint .* is damaged") as refusal:
        calibrate(job)
    assert refusal.value.hint == "start afresh with --restart"


TEXTS = {
    "nothing": b"",
    "half": b'{"schema": 1, "model"',
    "null": b"null",
    "deep": b"[" * 100_000,
    "40 deep": b"[" * 40 + b"]" * 40,
    "no UTF-8": b'{"schema": "\xff\xfe"}',
    "half a character": b'{"schema": 1, "model": "\\ud800"}',
    "a key twice": b'{"schema": 1, "schema": 1}',
    "NaN": b'{"schema": NaN}',
    "1e999": b'{"schema": 1e999}',
    "20 digits": b'{"schema": ' + b"9" * 20 + b"}",
    "a word": b'{"schema": "1"}',
    "zeros": bytes(100),
}


@pytest.mark.hostile("malformed")
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_text_that_is_no_json_of_ours(inside, folder, text):
    (folder / "manifest.json").write_bytes(text)
    assert all(" is damaged: " in says for says in all_refuse(inside, folder))
    with pytest.raises(RotationZooError, match="an index is"):
        index.parse(text, "an index")


GONE = object()
MEASURED = summary({"a": 8}, "0" * 64, {"needles": 16})
ARM = MEASURED["arms"]["a"]
# A path in the manifest -> what is there instead.
WRONG: dict[str, tuple] = {
    "model": (None, []),
    "model.id": (None, 3),
    "model.config_sha256": ("x", GONE),
    "model.revision": (3, GONE),
    "geometry": (None, {}, [], [1], [{}]),
    "geometry.0.kv_heads": (0, -1, 1.5, "2", True, None, 10**18, GONE),
    "geometry.0.owner": (1, GONE),
    "geometry.0.index": (1,),
    "geometry.0.surplus": (1,),
    "recipe": (None, [], {"composition": "magic"}),
    "recipe.name": (3, "a/b", "../x"),
    "recipe.group_size": (0, "x"),
    "recipe.data": (3, {"tokens": -1}),
    "recipe_sha256": ("x", GONE),
    "calibration": ([], {}, GONE),
    "calibration.tokens": ("many", -1),
    "identity": ([], {"weights": {"a": [1]}}),
    "versions": (None, {}, {"rotationzoo": 1}),
    "run.seconds": ("x", None),
    "metrics.orthogonality_error": ("0", {}),
    "metrics.validation": ([], {"rows": "yes"}),
    "metrics.evaluation": (
        3,
        {},
        {"arms": []},
        {**MEASURED, "verdict": "x"},
        {**MEASURED, "tokens": -1},
        {**MEASURED, "arms": {"a": {**ARM, "standard_error": 3}}},
        {**MEASURED, "arms": {"a": {**ARM, "kind": "mine"}}},
        {**MEASURED, "arms": {"another": ARM}},
    ),
    "files": (None, [], {}, {"rotations.safetensors": 3}),
    "files.rotations.safetensors": ({}, None, GONE),
    "imported": ({}, {"calibration": []}),
}


def put(content: dict, path: str, value) -> None:
    """Set or remove what is at a path; the last name may have dots in it."""
    at, names = content, path.split(".")
    while len(names) > 1 and not (isinstance(at, dict) and ".".join(names) in at):
        name = names.pop(0)
        at = at[int(name)] if isinstance(at, list) else at[name]
    if value is GONE:
        del at[".".join(names)]
    else:
        at[".".join(names)] = value


@pytest.mark.hostile("malformed")
@pytest.mark.parametrize(
    ("path", "value"),
    [
        pytest.param(path, value, id=f"{path}-{'gone' if value is GONE else value}")
        for path, values in WRONG.items()
        for value in values
    ],
)
def test_a_manifest_of_wrong_types_says_where(folder, path, value):
    with edited_manifest(folder) as content:
        put(content, path, value)
    with pytest.raises(RotationZooError) as refusal:
        Artifact.open(folder)
    said, _, where = str(refusal.value).partition(" is damaged: ")
    assert said == str(folder / "manifest.json")
    assert where.startswith(path.split(".")[0])
    assert len(str(refusal.value).splitlines()) == 1


def test_a_manifest_of_a_later_version_is_not_read(folder):
    with edited_manifest(folder) as content:
        content["schema"] = 9
    with pytest.raises(RotationZooError, match="has schema 9; this rotationzoo reads schema 1"):
        Artifact.open(folder)


def test_what_only_some_artifacts_have_may_be_missing(folder):
    """An artifact of an earlier version, without newer keys, and with unknown ones."""
    with edited_manifest(folder) as content:
        del content["calibration"]["note"], content["model"]["license"]
        content["run"] = {"seconds": 1.5, "peak_memory_bytes": None, "host": "x"}
        content["signature"] = {"by": "somebody"}
    assert verify(Artifact.open(folder)).ok
    assert Artifact.open(folder).content == content


def damaged_evaluation(damage) -> bytes:
    """An evaluation of another artifact, with a change in its window."""
    evaluation = make_evaluation()
    damage(evaluation["windows"][0])
    return json.dumps(evaluation).encode()


@pytest.mark.hostile("malformed")
@pytest.mark.parametrize(
    "text",
    [
        b"{}",
        b'{"model": 1, "windows": []}',
        b"[" * 50_000,
        b'{"model": "a", "windows": [{"arms": {"a": 3}}]}',
        damaged_evaluation(lambda window: window["arms"]["identity"].update(perplexity="<b>")),
        damaged_evaluation(lambda window: window["verdict"]["decisions"][0].update(interval=[1])),
        damaged_evaluation(lambda window: None),  # of another artifact
    ],
)
def test_an_evaluation_of_wrong_types(inside, folder, text):
    put_file(folder, "evaluation.json", text)
    assert "evaluation.json is damaged" in refused(inside("report", folder))
    assert not (inside.folder / "report.html").exists()


@pytest.mark.hostile("values")
def test_a_number_that_is_not_finite_is_never_written(folder):
    artifact = Artifact.open(folder)
    with pytest.raises(RotationZooError):
        strict_json.text({"perplexity": float("nan")})
    content = artifact.content | {"metrics": {"orthogonality_error": float("inf")}}
    with pytest.raises(RotationZooError, match=r"metrics\.orthogonality_error"):
        parse_manifest(content, "the manifest")
