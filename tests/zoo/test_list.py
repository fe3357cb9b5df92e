"""Listing, and the choice of an entry."""

import pytest
from support import reports
from support.published import refused
from support.reports import decided

from rotationzoo.errors import RotationZooError, UsageError
from rotationzoo.zoo import index, lookup


def test_what_is_not_there(zoo, tmp_path):
    assert "has no rotation for nobody/nothing" in refused(zoo.run("pull", "nobody/nothing"))
    assert "cannot be read" in refused(zoo.run("list", "--index", tmp_path / "missing.json"))
    (tmp_path / "bad.json").write_text("[]")
    assert "is not an index" in refused(zoo.run("list", "--index", tmp_path / "bad.json"))
    (tmp_path / "new.json").write_text('{"schema": 99, "entries": []}')
    assert "schema 99" in refused(zoo.run("list", "--index", tmp_path / "new.json"))


def test_files_of_others_are_listed_with_a_note(zoo):
    content = index.read(index.WHEEL_COPY)
    assert {entry.format for entry in content.entries} == {"oscar"}
    (noted,) = [entry for entry in content.entries if entry.note]
    assert noted.model == "MiniMaxAI/MiniMax-M3", "Hadamard matrices, read as any others"


def choose(*entries, recipe=None, revision=None, scaling=None):
    """The choice among entries with these differences: its number and reason."""
    listed = [
        index.Entry.model_validate(reports.listed(number, created=f"2026-01-0{number}", **entry))
        for number, entry in enumerate(entries, 1)
    ]
    loaded = lookup.LoadedIndex(index.Index(entries=listed), "an index")
    words = loaded, "a/b", revision, recipe, ["huggingface"], scaling
    entry, _, reason = lookup.choose_entry(*words)
    return listed.index(entry), reason


def rival(number: int, kept: float, day: int = 1, **others) -> dict:
    """An entry of the same model, and the share that it keeps."""
    evaluation = decided(kept, f"{number:064x}", **others)
    about = {"recipe": f"recipe-{number}", "created": f"2026-11-{day:02}"}
    return reports.listed(number, evaluation=evaluation, **about)


@pytest.mark.parametrize(
    ("engine", "number", "why"),
    [
        ("vllm", 1, "keeps the most answers for vllm: recipe-1 91% (88% to 93%), recipe-2 87%"),
        ("sglang", 4, ""),
        (None, 4, ""),
    ],
    ids=["measured for it", "measured with other questions for it", "no engine"],
)
def test_of_several_the_one_is_pulled_that_keeps_most_for_the_engine(engine, number, why):
    entries = [rival(1, 0.91), rival(2, 0.87, day=2)]
    entries.append(rival(3, 0.99, day=3, engine="sglang"))
    entries.append(rival(4, 0.8, day=4, engine="sglang", questions=64))
    loaded = lookup.LoadedIndex(index.Index.model_validate({"entries": entries}), "it")
    *_, easier = listed = loaded.content.entries
    assert index.kept_words(easier, listed) == "other questions"
    words = loaded, "a/b", None, None, ["huggingface"], None, engine
    entry, _, reason = lookup.choose_entry(*words)
    assert entry.recipe == f"recipe-{number}"
    assert why in reason
    assert ("keeps the most" in reason) == bool(why)


PLAIN = {"recipe": "oscar", "model_revision": "a" * 40}
YARN = {"recipe": "oscar-yarn-4", "rope_scaling": "yarn:4", "model_revision": "b" * 40}


def test_rotations_for_scaled_rope_are_pulled_by_who_asks_for_them():
    number, reason = choose(PLAIN, YARN)
    assert number == 0, "although the other is newer"
    assert reason.endswith("(there are also some for --rope-scaling yarn:4)")
    assert choose(PLAIN, YARN, revision="b" * 40)[0] == 0
    for asked in ({"scaling": "yarn:4.0"}, {"scaling": "yarn:4:8192"}, {"recipe": YARN["recipe"]}):
        number, reason = choose(PLAIN, YARN, **asked)
        assert number == 1
        assert reason.endswith(", with RoPE scaled by yarn:4")
    assert choose(YARN)[0] == 0, "there is no other"
    with pytest.raises(RotationZooError, match="its RoPE scaled by yarn:8") as refusal:
        choose(PLAIN, YARN, scaling="yarn:8")
    assert "its rotations are for: yarn:4; or make one" in refusal.value.hint
    with pytest.raises(UsageError, match="--rope-scaling must be written as"):
        choose(PLAIN, scaling="4")
