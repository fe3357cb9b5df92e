"""JSON of an artifact that is damaged: every command says where, in one sentence."""

import pytest
from support.command_line import all_refuse, edited_manifest, put_file, refused
from support.reports import summary

from rotationzoo.artifact.manifest import parse_manifest
from rotationzoo.artifact.store import Artifact
from rotationzoo.checks.verify import verify
from rotationzoo.errors import RotationZooError
from rotationzoo.storage import strict_json
from rotationzoo.zoo import index

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
    "model": (None, [], "x"),
    "model.id": (None, 3, ["x"]),
    "model.config_sha256": ("x", 1, GONE),
    "model.revision": (3, GONE),
    "model.license": (["mit"], {"a": 1}),
    "geometry": (None, {}, [], [1], [{}]),
    "geometry.0.kv_heads": (0, -1, 1.5, "2", True, None, 10**18, GONE),
    "geometry.0.owner": (1, GONE),
    "geometry.0.index": (1,),
    "geometry.0.surplus": (1,),
    "recipe": (None, [], {"composition": "magic"}),
    "recipe.name": (3, "a/b", "../x"),
    "recipe.group_size": (0, -1, "x"),
    "recipe.data": (3, {"tokens": -1}),
    "recipe_sha256": ("x", None, GONE),
    "calibration": ([], "x", {}, GONE),
    "calibration.tokens": ("many", -1, None),
    "calibration.note": (3,),
    "identity": ([], None, {"weights": {"a": [1]}}),
    "versions": (None, {}, {"rotationzoo": 1}),
    "run": (None, [], {}),
    "run.seconds": ("x", None),
    "metrics": (None, [], {}),
    "metrics.orthogonality_error": ("0", None, {}),
    "metrics.validation": ([], {}, {"on_gpu": "yes"}),
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
    "imported": (None, {}, {"calibration": []}),
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
    """An artifact of an earlier version, without the keys that came later and with some that nobody
    knows."""
    with edited_manifest(folder) as content:
        del content["calibration"]["note"], content["model"]["license"]
        content["run"] = {"seconds": 1.5, "peak_memory_bytes": None, "host": "x"}
        content["signature"] = {"by": "somebody"}
    assert verify(Artifact.open(folder)).ok
    assert Artifact.open(folder).content == content


@pytest.mark.hostile("malformed")
@pytest.mark.parametrize(
    "text",
    [
        b"{}",
        b'{"model": 1, "windows": []}',
        b"[" * 50_000,
        b'{"model": "a", "windows": [{"arms": {"a": 3}}]}',
    ],
)
def test_an_evaluation_of_wrong_types(inside, folder, text):
    put_file(folder, "evaluation.json", text)
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
