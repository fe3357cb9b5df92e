"""What an engine does not serve: refused with the flags that accept it, or left out and said."""

import shlex

import pytest
from support.engine_artifacts import CENTERED, OSCAR, exported
from support.oscar_files import refused
from support.recipes import CODED

from rotationzoo.artifact.reductions import Request
from rotationzoo.codec.engine_needs import ENGINES
from rotationzoo.engines.export import export, launch_line
from rotationzoo.writer import write_artifact

SHORT = CODED.model_copy(update={"sink": 8, "recent": 16})
BOTH = CENTERED.model_copy(update={"center_values": True})
VALUES, NEAREST = "values that keep their mean", "nearest codes instead of transform coding"
LEFT_OUT = [
    ("vllm-oscar", SHORT, {}, [
        "one rotation per layer instead of one per KV head", f"keys and {VALUES}",
        "windows 0/0 instead of 8/16", NEAREST]),
    ("llama.cpp", SHORT, {}, [
        "one rotation per layer instead of one per KV head", f"keys and {VALUES}",
        "clip ratios 0.96/0.96 instead of the artifact's own", NEAREST]),
    ("sglang", SHORT, {}, [VALUES, NEAREST]),
    ("sglang", OSCAR, {"clip": (1.0, 0.92)}, ["clip ratios 1/0.92 instead of the artifact's own"]),
    ("sglang", BOTH, {}, [VALUES]),
    ("sglang", BOTH, {"uncentered": True}, [f"keys and {VALUES}"]),
]  # fmt: skip


@pytest.mark.parametrize(("engine", "recipe", "changes", "reduced"), LEFT_OUT)
def test_what_an_engine_does_not_take_is_left_out_and_said(
    engine, recipe, changes, reduced, made, tmp_path
):
    artifact = made(recipe=recipe, head_dim=32)
    done = exported(engine, artifact, tmp_path, **changes)
    assert done.reduced == reduced
    if changes.get("clip"):
        assert done.launch.environment["SGLANG_OSCAR_K_CLIP_RATIO"] == "0", "SGLang's word for off"


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_an_engine_that_reads_artifacts_needs_no_files(made, tmp_path, monkeypatch, engine):
    monkeypatch.chdir(tmp_path)
    artifact = made(head_dim=32)
    done = export(artifact, Request(engine))
    command = ["rotationzoo", ENGINES[engine].command, "tiny/qwen3", "--revision", "0" * 40]
    assert shlex.split(launch_line(done.launch)) == [*command, "--rotations", str(artifact.folder)]
    assert (done.files, done.reduced, list(tmp_path.iterdir())) == ({}, [], [])
    assert "nothing is written for it" in refused(export, artifact, Request(engine, pooled=True))


REFUSED = [
    ("llama.cpp", OSCAR, {"clip": (0.96, 0.92)}, "has a single clip ratio"),
    ("sglang", OSCAR, {"windows": (60, 256)}, "multiples of 8"),
    ("sglang", OSCAR, {"windows": (0, 0)}, "without exact tokens"),
    ("vllm-oscar", OSCAR.model_copy(update={"group_size": 16}), {}, "one scale a head"),
]


@pytest.mark.parametrize(("engine", "recipe", "changes", "says"), REFUSED)
def test_what_a_user_asks_of_an_engine_that_has_it_not_is_refused(
    engine, recipe, changes, says, made, tmp_path
):
    artifact = made(recipe=recipe, head_dim=32)
    assert says in refused(exported, engine, artifact, tmp_path, **changes)


def test_without_statistics_nothing_is_pooled(made, tmp_path):
    artifact = made(head_dim=32)
    bare = write_artifact(tmp_path / "bare", artifact.rotations, None, dict(artifact.content))
    assert "has no statistics" in refused(exported, "vllm-oscar", bare, tmp_path / "vllm")
