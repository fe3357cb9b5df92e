"""How often the files of an artifact are opened, and who knows the names of what is in them."""

import ast
import hashlib
import re
from collections import Counter

import pytest
from support.places import ROOT
from support.published import ok

from rotationzoo.artifact import layout
from rotationzoo.artifact.store import Artifact
from rotationzoo.checks.verify import verify

TENSORS = ("rotations.safetensors", "statistics.safetensors")


@pytest.fixture
def opened(monkeypatch) -> Counter:
    """How often each file of tensors is hashed and read: keys `(what, name)`."""
    counts: Counter = Counter()
    file_digest, safe_open = hashlib.file_digest, layout.safe_open

    def hash_file(file, algorithm):
        counts["hashed", str(file.name).rpartition("/")[2]] += 1
        return file_digest(file, algorithm)

    def read_file(path, *more):
        counts["read", path.name] += 1
        return safe_open(path, *more)

    monkeypatch.setattr(hashlib, "file_digest", hash_file)
    monkeypatch.setattr(layout, "safe_open", read_file)
    return counts


def of_tensors(counts: Counter) -> dict[str, tuple[int, int]]:
    """Name -> times hashed, times read."""
    return {name: (counts["hashed", name], counts["read", name]) for name in TENSORS}


ONCE = dict.fromkeys(TENSORS, (1, 1))


def test_an_artifact_is_hashed_once_and_read_once(made, opened):
    artifact = Artifact.open(made)
    assert of_tensors(opened) == dict.fromkeys(TENSORS, (0, 0)), "nothing is read on opening"
    for _ in range(2):
        assert verify(artifact).ok
        assert artifact.rotations[0].key.matrix.shape == (2, 64, 64)
        assert artifact.statistics[0]["query"].count > 0
    assert of_tensors(opened) == ONCE


def test_what_is_pulled_is_hashed_and_read_once_and_handed_to_the_export(zoo, made, opened):
    ok(zoo.run("push", made, "someone/zoo", "--to", "huggingface", "--json"))
    pull = ("pull", "demo", "--repo", "someone/zoo", "--from", "huggingface", "--to", "sglang")
    for _ in range(2):  # downloaded, and there already
        opened.clear()
        ok(zoo.run(*pull, "--json"))
        assert of_tensors(opened) == ONCE


# ---- names of tensors


def test_one_module_knows_the_names_of_tensors():
    """Code that says `layers.3.key.rotation`, or takes such a name apart, is in `layout` alone;
    the model card shows two of them to its readers."""
    fields = "rotation|clip|eigenvalues|second_moment|key_energy|count"
    pattern = re.compile(rf"^layers\.|(?<!^model)\.layers\.|^\.({fields})$")
    who = set()
    for path in sorted((ROOT / "rotationzoo").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and pattern.search(text):
                who.add(path.relative_to(ROOT / "rotationzoo").as_posix())
    assert who == {"artifact/layout.py"}
