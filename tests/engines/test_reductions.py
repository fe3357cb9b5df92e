"""What an engine does not serve: refused with the flags that accept it, or left out and said."""

import pytest
from support.engine_artifacts import (
    CENTERED,
    OSCAR,
    exported,
)

from rotationzoo.errors import RotationZooError
from rotationzoo.writer import write_artifact


def test_what_an_engine_does_not_take_is_refused_with_the_whole_command(made, tmp_path):
    artifact = made(recipe=CENTERED, head_dim=32)
    with pytest.raises(
        RotationZooError, match=r"one rotation per layer.*a single clip ratio"
    ) as refused:
        exported("llama.cpp", artifact, tmp_path, pooled=False, clip=None)
    base, out = tmp_path / "base.gguf", tmp_path / "out"
    assert refused.value.hint == (
        f"with all of that: rotationzoo export {artifact.folder} --to llama.cpp --output {out} "
        f"--base {base} --pooled --clip 0.96"
    )
    assert "per KV head (--pooled)" in str(refused.value)
    with pytest.raises(RotationZooError, match="no tokens kept exact") as refused:
        exported("vllm", artifact, tmp_path, windows=None)
    assert refused.value.hint.endswith(" --pooled --windows 0/0")
    done = exported("vllm", artifact, tmp_path)
    assert len(done.reduced) == 3, done.reduced
    assert "keys that keep their mean" in done.reduced


def test_means_that_an_engine_does_not_subtract_are_left_out(made, tmp_path):
    artifact = made(recipe=CENTERED.model_copy(update={"center_values": True}), head_dim=32)
    done = exported("sglang", artifact, tmp_path / "sglang")
    assert done.reduced == ["values that keep their mean"]
    done = exported("sglang", artifact, tmp_path / "older", uncentered=True)
    assert done.reduced == ["keys and values that keep their mean"]
    done = exported("onnx", artifact, tmp_path / "onnx")
    assert done.reduced == ["keys and values that keep their mean"]


def test_other_refusals(made, tmp_path):
    artifact = made(head_dim=32)
    with pytest.raises(RotationZooError, match="multiples of 8"):
        exported("sglang", artifact, tmp_path, windows=(60, 256))
    with pytest.raises(RotationZooError, match="no token is kept exact"):
        exported("onnx", artifact, tmp_path, windows=(0, 0))
    with pytest.raises(RotationZooError, match="one scale a head"):
        exported(
            "vllm", made(recipe=OSCAR.model_copy(update={"group_size": 16}), head_dim=32), tmp_path
        )
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    with pytest.raises(RotationZooError, match="holds other files"):
        exported("sglang", artifact, tmp_path)
    bare = write_artifact(tmp_path / "bare", artifact.rotations, None, dict(artifact.content))
    with pytest.raises(RotationZooError, match="has no statistics"):
        exported("vllm", bare, tmp_path / "vllm")
