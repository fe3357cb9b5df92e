"""What an engine does not serve: refused with the flags that accept it, or left out and said."""

import shlex

import pytest
from support.engine_artifacts import CENTERED, OSCAR, exported
from support.oscar_files import refused
from support.recipes import CODED
from support.tensors import stored_rotations

from rotationzoo.artifact.layout import rotations_from
from rotationzoo.artifact.reductions import Request
from rotationzoo.calibration.soundness import Verification
from rotationzoo.codec.engine_needs import ENGINES
from rotationzoo.engines import export as exporting
from rotationzoo.engines.export import export, launch_line
from rotationzoo.errors import RotationZooError
from rotationzoo.writer import write_artifact


def test_what_an_engine_does_not_take_is_left_out_and_said(made, tmp_path):
    artifact = made(recipe=CODED.model_copy(update={"sink": 8, "recent": 16}), head_dim=32)
    assert exported("vllm-oscar", artifact, tmp_path / "a").reduced == [
        "one rotation per layer instead of one per KV head",
        "keys and values that keep their mean",
        "windows 0/0 instead of 8/16",
        "nearest codes instead of transform coding",
    ]
    assert "clip ratios 0.96/0.96 instead of the artifact's own" in (
        exported("llama.cpp", artifact, tmp_path / "b").reduced
    )
    assert exported("sglang", artifact, tmp_path / "c").reduced == [
        "values that keep their mean",
        "nearest codes instead of transform coding",
    ]


def test_what_a_user_asks_of_an_engine_that_has_it_not_is_refused(made, tmp_path):
    artifact = made(head_dim=32)
    with pytest.raises(RotationZooError, match="single clip ratio") as refused:
        exported("llama.cpp", artifact, tmp_path, clip=(0.96, 0.92))
    assert refused.value.hint == "--clip 0.96"


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_an_engine_that_reads_artifacts_needs_no_files(made, tmp_path, monkeypatch, engine):
    monkeypatch.chdir(tmp_path)
    artifact = made(head_dim=32)
    done = export(artifact, Request(engine))
    command = ["rotationzoo", ENGINES[engine].command, "tiny/qwen3", "--revision", "0" * 40]
    assert shlex.split(launch_line(done.launch)) == [*command, "--rotations", str(artifact.folder)]
    assert (done.files, done.reduced, list(tmp_path.iterdir())) == ({}, [], [])
    assert "nothing is written for it" in refused(export, artifact, Request(engine, pooled=True))


def test_means_that_an_engine_does_not_subtract_are_left_out(made, tmp_path):
    artifact = made(recipe=CENTERED.model_copy(update={"center_values": True}), head_dim=32)
    done = exported("sglang", artifact, tmp_path / "sglang")
    assert done.reduced == ["values that keep their mean"]
    done = exported("sglang", artifact, tmp_path / "older", uncentered=True)
    assert done.reduced == ["keys and values that keep their mean"]


def test_clip_ratios_of_single_heads(made, tmp_path, monkeypatch):
    """No recipe makes such an artifact yet, so its verification, which knows that, is left out."""
    monkeypatch.setattr(exporting, "verify", lambda artifact: Verification([], None, []))
    artifact = made(head_dim=32)
    tensors = stored_rotations(artifact)
    tensors["layers.1.key.clip"][1] = 0.9
    changed = write_artifact(
        tmp_path / "changed", rotations_from(tensors), artifact.statistics, dict(artifact.content)
    )
    done = exported("sglang", changed, tmp_path / "highest")
    assert done.reduced == ["clip ratios 0.96/0.92 instead of the artifact's own"]
    done = exported("sglang", changed, tmp_path / "sglang", clip=(1.0, 0.92))
    assert done.launch.environment["SGLANG_OSCAR_K_CLIP_RATIO"] == "0", "SGLang's word for off"
    assert done.reduced == ["clip ratios 1/0.92 instead of the artifact's own"]


def test_other_refusals(made, tmp_path):
    artifact = made(head_dim=32)
    assert "multiples of 8" in refused(exported, "sglang", artifact, tmp_path, windows=(60, 256))
    assert "without exact tokens" in refused(exported, "sglang", artifact, tmp_path, windows=(0, 0))
    with pytest.raises(RotationZooError, match="one scale a head"):
        exported(
            "vllm-oscar",
            made(recipe=OSCAR.model_copy(update={"group_size": 16}), head_dim=32),
            tmp_path,
        )
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    assert "holds other files" in refused(exported, "sglang", artifact, tmp_path)
    bare = write_artifact(tmp_path / "bare", artifact.rotations, None, dict(artifact.content))
    assert "has no statistics" in refused(exported, "vllm-oscar", bare, tmp_path / "vllm")
