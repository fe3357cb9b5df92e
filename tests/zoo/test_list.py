"""Listing: what is there, what only its index knows, and what is not there."""

import pytest
from support.command_line import succeeded
from support.published import ZOO, ok, refused

from rotationzoo.errors import RotationZooError, UsageError
from rotationzoo.zoo import index, lookup


def test_a_listing_that_omits_a_file(zoo, made):
    """Pull does not rely on listings."""
    path = ok(zoo.run("push", made, ZOO, "--json"))["path"]
    zoo.hf.hidden.add(f"{path}/rotations.safetensors")
    ok(zoo.run("pull", "demo", "--repo", ZOO, "--from", "huggingface", "--json"))


def test_what_is_not_there(zoo, tmp_path):
    assert "has no rotation for nobody/nothing" in refused(zoo.run("pull", "nobody/nothing"))
    assert "cannot be read" in refused(zoo.run("list", "--index", tmp_path / "missing.json"))
    (tmp_path / "bad.json").write_text("[]")
    assert "is no index" in refused(zoo.run("list", "--index", tmp_path / "bad.json"))
    (tmp_path / "new.json").write_text('{"schema": 99, "entries": []}')
    assert "schema 99" in refused(zoo.run("list", "--index", tmp_path / "new.json"))
    assert "regenerate --plan" in refused(zoo.run("regenerate"), code=2)


def test_what_is_published_and_not_pulled_is_listed_with_what_it_is(zoo):
    content = index.read(index.WHEEL_COPY)
    kinds = {(entry.model, entry.format) for entry in content.entries}
    for model in ("zai-org/GLM-5.2-FP8", "zai-org/GLM-5.3", "moonshotai/Kimi-K3"):
        assert (model, "latent") in kinds
    assert ("MiniMaxAI/MiniMax-M3", "oscar") in kinds, "Hadamard matrices, read as any others"
    assert len([entry for entry in content.entries if entry.format == "gguf"]) == 3
    assert all(entry.note for entry in content.entries if not entry.pullable)
    listed = succeeded(zoo.run("list", "GLM-5", "--index", "bundled"))
    assert "latent" in listed.stdout
    words = refused(zoo.run("pull", "zai-org/GLM-5.3", "--index", "bundled"))
    said = "what is published for zai-org/GLM-5.3 is not pulled: one matrix a layer for the latent"
    assert said in words
    found = lookup.LoadedIndex(content, "the index")
    entry, _, _ = lookup.choose_entry(found, "Qwen/Qwen3-32B", None, None, ["huggingface"])
    assert entry.format == "oscar", "although a model with the same rotations is listed too"


def choose(*entries, recipe=None, revision=None, scaling=None):
    """What is chosen among entries that differ from the first of the package's as stated."""
    first = next(e for e in index.read(index.WHEEL_COPY).entries if e.pullable)
    listed = [first.model_copy(update={"created": f"2026-01-0{number}", **entry})
              for number, entry in enumerate(entries, 1)]  # fmt: skip
    loaded = lookup.LoadedIndex(index.Index.model_construct(entries=listed), "an index")
    words = loaded, first.model, revision, recipe, ["huggingface"], scaling
    entry, _, reason = lookup.choose_entry(*words)
    return listed.index(entry), reason


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


def test_an_index_says_what_scaling_rotations_are_for(zoo, made, tmp_path):
    """As their manifest does, or they are refused."""
    ok(zoo.run("push", made, ZOO, "--index", tmp_path / "mine.json", "--json"))
    content = index.read(tmp_path / "mine.json")
    assert content.entries[0].rope_scaling is None
    scaled = content.entries[0].model_copy(update={"rope_scaling": "yarn:4"})
    (tmp_path / "mine.json").write_text(index.Index(entries=[scaled]).text())
    text = refused(zoo.run("pull", "demo", "--index", tmp_path / "mine.json"))
    assert "with another rope scaling than its manifest has" in text
