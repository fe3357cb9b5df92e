"""Files of an artifact that are damaged, or lie: every command says so in one sentence, before it
computes anything."""

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save, save_file
from support.damage import SMALL, refused, small_artifact

from rotationzoo.artifact.manifest import parse_manifest
from rotationzoo.artifact.store import Artifact
from rotationzoo.calibration.job import calibrate
from rotationzoo.calibration.plan import Job
from rotationzoo.checks.verify import verify
from rotationzoo.errors import RotationZooError
from rotationzoo.storage import files, strict_json
from rotationzoo.zoo import index

READERS = (
    ("inspect",),
    ("verify",),
    ("report",),
    ("export", "--to", "sglang"),
    ("push", "me/zoo", "--dry-run"),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    return small_artifact(tmp_path_factory.mktemp("made"))


@pytest.fixture
def folder(made, tmp_path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "damaged"))


def all_refuse(inside, folder: Path) -> list[str]:
    """What each command says, in one sentence."""
    return [refused(inside(word, folder, *more)) for word, *more in READERS]


# ---- JSON

TEXTS = {
    "nothing": b"", "half": b'{"schema": 1, "model"', "no table": b"[]", "a number": b"1", "null": b"null",
    "deep": b"[" * 100_000, "deep and closed": b'{"a":' * 900 + b"1" + b"}" * 900, "40 deep": b"[" * 40 + b"]" * 40,
    "no UTF-8": b'{"schema": "\xff\xfe"}', "half a character": b'{"schema": 1, "model": "\\ud800"}',
    "a key twice": b'{"schema": 1, "schema": 1}', "NaN": b'{"schema": NaN}', "infinity": b'{"schema": -Infinity}',
    "1e999": b'{"schema": 1e999}', "5,000 digits": b'{"schema": ' + b"9" * 5000 + b"}",
    "20 digits": b'{"schema": ' + b"9" * 20 + b"}",
    "a word": b'{"schema": "1"}', "a truth": b'{"schema": true}', "1.5": b'{"schema": 1.5}', "zeros": bytes(100),
}  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [pytest.param(t, id=name, marks=pytest.mark.hostile("malformed")) for name, t in TEXTS.items()],
)
def test_text_that_is_no_json_of_ours(inside, folder, text):
    (folder / "manifest.json").write_bytes(text)
    assert all(" is damaged: " in says for says in all_refuse(inside, folder))
    with pytest.raises(RotationZooError, match="an index is"):
        index.parse(text, "an index")


GONE = object()
ARM = {"perplexity_increase": 0.1, "attention_kl": None, "output_error": 0.1}
MEASURED = {
    "text": "x", "tokens": 9, "perplexity": 2.0, "format": "sglang", "sink": 0, "recent": 0, "arms": {"a": ARM}
}  # fmt: skip
KEPT = {"key": {"clip": 1.0}, "value": {"clip": 1.0}, "by_side": {}, "trimmed": 0.1}
# A path in the manifest -> what is there instead.
WRONG: dict[str, tuple] = {
    "model": (None, [], "x"), "model.id": (None, 3, ["x"]), "model.config_sha256": ("x", 1, GONE), "model.revision": (3, GONE),
    "model.license": (["mit"], {"a": 1}), "geometry": (None, {}, [], [1], [{}]),
    "geometry.0.kv_heads": (0, -1, 1.5, "2", True, None, 10**18, GONE), "geometry.0.owner": (1, GONE), "geometry.0.index": (1,),
    "geometry.0.surplus": (1,), "recipe": (None, [], {"composition": "magic"}), "recipe.name": (3, "a/b", "../x"),
    "recipe.group_size": (0, -1, "x"), "recipe.search": (3, {"texts": -1}), "recipe_sha256": ("x", None, GONE),
    "calibration": ([], "x", {}, GONE), "calibration.tokens": ("many", -1, None), "calibration.source": (None, "self"),
    "calibration.note": (3,), "identity": ([], None, {"weights": {"a": [1]}}), "versions": (None, {}, {"rotationzoo": 1}),
    "run": (None, [], {}), "run.seconds": ("x", None),
    "metrics": (None, [], {}), "metrics.orthogonality_error": ("0", None, {}),
    "metrics.validation": ([], {}, {"on_gpu": "yes"}), "metrics.evaluation": (
        3, {}, {"arms": []}, {**MEASURED, "verdict": "x"}, {**MEASURED, "texts": -1},
        {**MEASURED, "arms": {"a": {**ARM, "standard_error": 3}}},
    ),
    "files": (None, [], {}, {"rotations.safetensors": 3}), "files.rotations.safetensors": ({}, None, GONE),
    "imported": (None, {}, {"calibration": []}),
    "search": (None, {}, {"model": {"key": {"clip": "x"}}}, {"model": {**KEPT, "kept": "all"}, "layers": {}}),
}  # fmt: skip


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


@pytest.mark.parametrize(
    ("path", "value"),
    [
        pytest.param(
            path,
            value,
            marks=pytest.mark.hostile("malformed"),
            id=f"{path}-{'gone' if value is GONE else value}",
        )
        for path, values in WRONG.items()
        for value in values
    ],
)
def test_a_manifest_of_wrong_types_says_where(folder, path, value):
    content = json.loads((folder / "manifest.json").read_text())
    put(content, path, value)
    (folder / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(RotationZooError) as refusal:
        Artifact.open(folder)
    said, _, where = str(refusal.value).partition(" is damaged: ")
    assert said == str(folder / "manifest.json")
    assert where.startswith(path.split(".")[0])
    assert len(str(refusal.value).splitlines()) == 1


def test_what_only_some_artifacts_have_may_be_missing(folder):
    """An artifact of an earlier version, without the keys that came later and with some that nobody
    knows."""
    content = json.loads((folder / "manifest.json").read_text())
    del content["calibration"]["note"], content["model"]["license"]
    content["run"] = {"seconds": 1.5, "peak_memory_bytes": None, "host": "x"}
    content["signature"] = {"by": "somebody"}
    (folder / "manifest.json").write_text(json.dumps(content))
    assert verify(Artifact.open(folder)).ok
    assert Artifact.open(folder).content == content


@pytest.mark.hostile("malformed")
@pytest.mark.parametrize(
    "text",
    [
        b"{}",
        b'{"own_arm": 1, "windows": []}',
        b"[" * 50_000,
        b'{"own_arm": "a", "windows": [{"arms": {"a": 3}}]}',
    ],
)
def test_an_evaluation_of_wrong_types(inside, folder, text):
    content = json.loads((folder / "manifest.json").read_text())
    content["files"]["evaluation.json"] = {"size": len(text), "sha256": files.digest(text)}
    (folder / "manifest.json").write_text(json.dumps(content))
    (folder / "evaluation.json").write_bytes(text)
    assert "evaluation.json is damaged: " in refused(inside("report", folder))


@pytest.mark.hostile("values")
def test_a_number_that_is_not_finite_is_never_written(folder):
    artifact = Artifact.open(folder)
    with pytest.raises(RotationZooError):
        strict_json.text({"perplexity": float("nan")})
    with pytest.raises(RotationZooError, match=r"metrics\.orthogonality_error"):
        parse_manifest(
            artifact.content | {"metrics": {"orthogonality_error": float("inf")}}, "the manifest"
        )


# ---- sizes


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.hostile("size"))
        for n in ("manifest.json", "zoo_index.json")
    ],
)
def test_json_of_a_terabyte_is_not_read(inside, folder, name):
    """Sparse: it takes no room on the disk, and would take all of the memory."""
    with (folder / name).open("wb") as file:
        file.truncate(1 << 40)
    words = ("list", "--index", folder / name) if name == "zoo_index.json" else ("verify", folder)
    assert "has 1,099,511,627,776 bytes, and no such file has more" in refused(inside(*words))


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.hostile("size")) for n in ("rotations", "statistics")],
)
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


@pytest.mark.hostile("size")
@pytest.mark.parametrize("size", [0, 1, 10**18])
def test_a_manifest_that_lies_about_a_size(inside, folder, size):
    content = json.loads((folder / "manifest.json").read_text())
    content["files"]["rotations.safetensors"]["size"] = size
    (folder / "manifest.json").write_text(json.dumps(content))
    result = inside("verify", folder)
    refused(result)
    assert f"bytes, not {size}" in result.stdout


def header(**tensors) -> bytes:
    text = json.dumps({name.replace("__", "."): entry for name, entry in tensors.items()}).encode()
    return struct.pack("<Q", len(text)) + text + bytes(64)


HEADERS = {
    "more elements than bytes": header(
        layers__0__key__rotation={"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 64]}
    ),
    "beyond the file": header(
        layers__0__key__rotation={"dtype": "F32", "shape": [1 << 38], "data_offsets": [0, 1 << 40]}
    ),
    "an overflow": header(
        layers__0__key__rotation={
            "dtype": "F32",
            "shape": [1 << 32, 1 << 32],
            "data_offsets": [0, 64],
        }
    ),
    "a header of 2^60": struct.pack("<Q", 1 << 60) + b"{}",
    "two on one place": header(
        a={"dtype": "F32", "shape": [16], "data_offsets": [0, 64]},
        b={"dtype": "F32", "shape": [16], "data_offsets": [0, 64]},
    ),
    "a type of its own": header(a={"dtype": "Q4", "shape": [16], "data_offsets": [0, 64]}),
    "a type that no artifact has": header(
        a={"dtype": "U8", "shape": [64], "data_offsets": [0, 64]}
    ),
    "nothing": b"",
    "a name of 1 MB": header(
        **{"x" * (1 << 20): {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}}
    ),
}


@pytest.mark.parametrize(
    "data",
    [pytest.param(d, id=name, marks=pytest.mark.hostile("size")) for name, d in HEADERS.items()],
)
def test_a_header_that_asks_for_more_than_the_file_has(inside, folder, data):
    """safetensors holds shape times type against the size of the file; what it lets through is held
    against the geometry."""
    replace_rotations(folder, data)
    for says in all_refuse(inside, folder):
        assert len(says) < 2000
    problems = verify(Artifact.open(folder)).problems
    assert len(problems) >= 1
    assert all(len(problem) < 1000 for problem in problems)


# ---- tensors


def replace_rotations(folder: Path, data: bytes) -> None:
    """Other rotations, with a manifest that says that they are right."""
    (folder / "rotations.safetensors").write_bytes(data)
    content = json.loads((folder / "manifest.json").read_text())
    content["files"]["rotations.safetensors"] = {"size": len(data), "sha256": files.digest(data)}
    (folder / "manifest.json").write_text(json.dumps(content))


def without(name):
    return lambda tensors: tensors.pop(name)


def reshaped(name, change):
    return lambda tensors: tensors.update({name: change(tensors[name]).contiguous()})


KEY = "layers.0.key.rotation"
CHANGES = {
    "no clip": (without("layers.1.value.clip"), "value clip missing: layer 1"),
    "no rotation": (without(KEY), "key rotation missing: layer 0"),
    "no eigenvalues": (without("layers.0.key.eigenvalues"), "key eigenvalues missing"),
    "fewer heads": (reshaped(KEY, lambda t: t[:1]), "of another shape or type"),
    "more heads": (reshaped(KEY, lambda t: torch.cat([t, t])), "of another shape or type"),
    "another dimension": (reshaped(KEY, lambda t: t[:, :8, :8]), "of another shape or type"),
    "flat": (reshaped(KEY, lambda t: t.flatten()), "of another shape or type"),
    "float64": (reshaped(KEY, lambda t: t.double()), "of another shape or type"),
    "integers": (reshaped(KEY, lambda t: t.long()), "of another shape or type"),
    "clips for one head": (
        reshaped("layers.0.key.clip", lambda t: t[:1]),
        "key clip of another shape",
    ),
    "one more": (
        lambda tensors: tensors.update({"layers.x.key.rotation": torch.ones(1)}),
        "belong to no layer",
    ),
    "another name": (
        lambda tensors: tensors.update({"rotation": torch.ones(1)}),
        "belong to no layer",
    ),
    "none": (lambda tensors: tensors.clear(), "missing: layers 0, 1"),
    "NaN": (reshaped(KEY, lambda t: t * float("nan")), "key rotation not finite"),
}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        pytest.param(*row, id=name, marks=pytest.mark.hostile("values"))
        for name, row in CHANGES.items()
    ],
)
def test_tensors_that_are_not_those_of_the_geometry(inside, folder, change, says):
    tensors = load_file(folder / "rotations.safetensors")
    change(tensors)
    replace_rotations(folder, save(tensors))
    for word, *more in (*READERS, ("validate", "--device", "cpu")):
        result = inside(word, folder, *more)
        assert says in refused(result) + result.stdout, word


@pytest.mark.hostile("values")
def test_an_evaluation_of_tensors_that_do_not_fit(inside, folder, made):
    tensors = load_file(folder / "rotations.safetensors")
    del tensors["layers.0.key.clip"]
    replace_rotations(folder, save(tensors))
    words = (
        "evaluate",
        made.parent / "tiny",
        folder,
        "--tokens",
        "512",
        "--length",
        "256",
        "--queries",
        "0",
    )
    assert "key clip missing: layer 0" in refused(inside(*words))


@pytest.mark.hostile("malformed")
def test_statistics_that_the_manifest_does_not_list_are_nobodys(folder):
    artifact = Artifact.open(folder)
    listed = {
        name: known
        for name, known in artifact.content["files"].items()
        if name != "statistics.safetensors"
    }
    (folder / "manifest.json").write_text(json.dumps({**artifact.content, "files": listed}))
    assert Artifact.open(folder).statistics_tensors() is None


# ---- checkpoints


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(change, id=name, marks=pytest.mark.hostile("malformed"))
        for name, change in {
            "no metadata": lambda tensors, told: told.clear(),
            "deep": lambda tensors, told: told.update(done="[" * 50_000),
            "a word for a number": lambda tensors, told: told.update(done='"2"'),
            "less than nothing": lambda tensors, told: told.update(done="-5"),
            "an identity of lists": lambda tensors, told: told.update(identity="[]"),
            "another name": lambda tensors, told: tensors.update({"a.b.c.d": torch.ones(1)}),
            "one less": lambda tensors, told: tensors.popitem(),
            "another shape": lambda tensors, told: tensors.update(
                {"0.query.second": torch.ones(1)}
            ),
        }.items()
    ],
)
def test_a_checkpoint_that_is_damaged(made, tmp_path, change):
    def stop(stage, done, total):
        if stage == "calibrating" and done == 2:
            raise KeyboardInterrupt

    job = Job(str(made.parent / "tiny"), SMALL, tmp_path / "out", batch=1, device="cpu")
    with pytest.raises(KeyboardInterrupt):
        calibrate(job, stop)
    from safetensors import safe_open

    with safe_open(job.checkpoint, "pt") as file:
        told = dict(file.metadata())
    tensors = load_file(job.checkpoint)
    change(tensors, told)
    save_file(tensors, job.checkpoint, told)
    with pytest.raises(RotationZooError, match=r"the checkpoint .* is damaged") as refusal:
        calibrate(job)
    assert refusal.value.hint == "start afresh with --restart"
