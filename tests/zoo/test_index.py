"""The index: its schema, and new entries."""

import json

import pytest
from support.places import ROOT

from rotationzoo.zoo import index

ENTRY = index.Entry(
    model="a/b",
    recipe="oscar",
    files={"rotations.safetensors": index.File(size=1, sha256="0" * 64)},
    copies=[index.Copy(hub="huggingface", repo="x/y", path="p", revision="r1")],
)


def test_the_wheel_carries_the_index():
    assert index.WHEEL_COPY.read_bytes() == (ROOT / "zoo_index.json").read_bytes()
    content = index.read(index.WHEEL_COPY)
    assert content.text() == index.WHEEL_COPY.read_text()
    assert {"Qwen/Qwen3-8B", "Qwen/Qwen3-32B", "zai-org/GLM-4.7-FP8"} <= {
        entry.model for entry in content.entries
    }


def test_an_entry_is_merged_when_it_is_added_and_refused_twice_or_elsewhere():
    one = index.Index().extended(ENTRY)
    moved = ENTRY.model_copy(
        update={"copies": [index.Copy(hub="modelscope", repo="x/y", path="p", revision="t")]}
    )
    both = one.extended(moved)
    assert [copy.hub for copy in both.entries[0].copies] == ["huggingface", "modelscope"]
    assert index.parse(both.text(), "it") == both
    content = json.loads(one.text())
    content["entries"] *= 2
    with pytest.raises(Exception, match="is listed twice"):
        index.parse(json.dumps(content), "it")
    elsewhere = one.text().replace('"huggingface"', '"nowhere"')
    with pytest.raises(Exception, match=r"copies\.0\.hub: Input should be 'huggingface', "):
        index.parse(elsewhere, "it")
    for change in (
        {"files": {"rotations.safetensors": {"size": 1, "sha256": "zz"}}},
        {"files": {"rotations.safetensors": {"size": -1, "sha256": "0" * 64}}},
        {"files": {"rotations.safetensors": {"size": 1, "sha256": None}}},
        {"summary": {"bits_per_element": 0}},
        {"summary": {"perplexity_increase": "much"}},
    ):
        content = json.loads(one.text())
        content["entries"][0] |= change
        with pytest.raises(Exception, match=r"it is damaged: entries\.0"):
            index.parse(json.dumps(content), "it")


def test_what_later_versions_add_is_ignored_and_kept():
    """Only in the description of an entry, not where files are located."""
    content = json.loads(index.Index().extended(ENTRY).text())
    content["mirrors"] = ["z"]
    # Also names of methods and properties, which no file may replace.
    later = {"rating": {"stars": 5}, "identity": "mine", "measured": False, "text": "x"}
    content["entries"][0] |= later
    content["entries"][0]["summary"] = {"perplexity_increase": 0.5, "seconds": 1.5}
    parsed = index.parse(json.dumps(content), "it")
    assert parsed.entries[0].identity == "0" * 64
    assert parsed.entries[0].measured is None
    other = ENTRY.model_copy(update={"model": "c/d"})
    rewritten = json.loads(parsed.extended(other).text())
    assert rewritten["mirrors"] == ["z"]
    assert rewritten["entries"][0] == content["entries"][0]
    # Also when the same rotations are published again.
    merged = json.loads(parsed.extended(ENTRY).text())["entries"][0]
    assert {key: merged[key] for key in later} == later
    for part in (
        content["entries"][0]["copies"][0],
        content["entries"][0]["files"]["rotations.safetensors"],
    ):
        part["later"] = 1
        with pytest.raises(Exception, match="later: Extra inputs are not permitted"):
            index.parse(json.dumps(content), "it")
        del part["later"]
