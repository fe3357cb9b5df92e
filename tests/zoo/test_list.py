"""Listing: what is there, what only its index knows, and what is not there."""

from support.published import ZOO, ok, refused

from rotationzoo.zoo import index, lookup


def test_a_listing_that_omits_a_file(zoo, made):
    """Pull does not rely on listings; `list --remote` says that the file is not there."""
    path = ok(zoo.run("push", made, ZOO, "--json"))["path"]
    zoo.hf.hidden.add(f"{path}/rotations.safetensors")
    assert [
        e["there"] for e in ok(zoo.run("list", "--repo", ZOO, "--remote", "--json"))["entries"]
    ] == [False]
    ok(zoo.run("pull", "demo", "--repo", ZOO, "--from", "huggingface", "--json"))


def test_what_is_not_there(zoo, tmp_path):
    assert "has no rotation for nobody/nothing" in refused(zoo.run("pull", "nobody/nothing"))
    assert "cannot be read" in refused(
        zoo.run("pull", "demo", "--index", tmp_path / "missing.json")
    )
    (tmp_path / "bad.json").write_text("[]")
    assert "is no index" in refused(zoo.run("list", "--index", tmp_path / "bad.json"))
    (tmp_path / "new.json").write_text('{"schema": 99, "entries": []}')
    assert "schema 99" in refused(zoo.run("list", "--index", tmp_path / "new.json"))
    assert "regenerate --plan" in refused(zoo.run("regenerate"), code=2)


def test_what_is_published_and_not_pulled_is_listed_with_what_it_is(zoo):
    content = index.read(index.WHEEL_COPY)
    kinds = {(entry.model, entry.format) for entry in content.entries}
    assert {
        (model, "latent")
        for model in ("zai-org/GLM-5.2-FP8", "zai-org/GLM-5.3", "moonshotai/Kimi-K3")
    } <= kinds
    assert ("MiniMaxAI/MiniMax-M3", "oscar") in kinds, (
        "Hadamard matrices, which are read as any others"
    )
    assert len([entry for entry in content.entries if entry.format == "gguf"]) == 3
    assert all(entry.note for entry in content.entries if not entry.pullable)
    listed = zoo.run("list", "GLM-5", "--index", "bundled")
    assert listed.returncode == 0, listed.stderr
    assert "latent" in listed.stdout
    words = refused(zoo.run("pull", "zai-org/GLM-5.3", "--index", "bundled"))
    assert (
        "what is published for zai-org/GLM-5.3 is not pulled: one matrix a layer for the latent"
        in words
    )
    found = lookup.LoadedIndex(content, "the index")
    entry, _, _ = lookup.choose_entry(found, "Qwen/Qwen3-32B", None, None, ["huggingface"])
    assert entry.format == "oscar", (
        "the pair, although a model with the same rotations is listed too"
    )
