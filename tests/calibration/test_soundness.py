"""What would not pass verify is never written, whoever writes it, and one sentence says what and
where."""

import pytest
import torch
from support.models import edited_weights, save_tiny
from support.tensors import stored_rotations

from rotationzoo.artifact.layout import rotations_from
from rotationzoo.artifact.store import Artifact
from rotationzoo.calibration.job import calibrate
from rotationzoo.calibration.plan import Job
from rotationzoo.calibration.soundness import write_sound_artifact
from rotationzoo.checks.verify import verify
from rotationzoo.errors import Unsound
from rotationzoo.recipe import Data, Recipe

RECIPE = Recipe(data=Data(tokens=512, length=128))


@pytest.mark.hostile("values")
@pytest.mark.parametrize(
    ("side", "recipe"),
    [
        ("value", RECIPE),
        ("value", RECIPE.model_copy(update={"value_statistic": "value"})),
        ("key", RECIPE),
    ],
)
def test_weights_too_large_for_float32_statistics(side, recipe, inside, tmp_path):
    model = save_tiny(tmp_path / "model")
    # Keys pass through a norm, whose own weight scales them.
    name = "q_norm" if side == "key" else "v_proj"
    with edited_weights(model) as weights:
        weights[f"model.layers.1.self_attn.{name}.weight"] *= 1e30
    (inside.folder / "mine.yaml").write_text(recipe.yaml())
    words = ["calibrate", model, "--recipe", "mine.yaml", "--output", "made/out", "--device", "cpu"]
    done = inside(*words)
    assert done.returncode == 1
    first, second = done.stderr.splitlines()
    assert first == (
        "Error: not written, since it would not pass verify: "
        f"{side} eigenvalues not finite: layer 1"
    )
    assert second.startswith("Hint: ")
    there = [path.name for path in inside.folder.iterdir()]
    assert there == ["mine.yaml"], "no artifact, no checkpoint"


@pytest.mark.hostile("values")
@pytest.mark.parametrize("mean", [1e300, 1e30, -1e19])
def test_a_key_mean_that_no_cache_takes_is_not_imported(pair, tmp_path, mean):
    for entry in pair.key["layers"].values():
        entry["k_mean"] = torch.zeros(64, dtype=torch.float64)
    pair.key["layers"][3]["k_mean"][5] = mean
    said = pair.refused()
    assert "key mean" in said
    assert "layer 3" in said
    assert {path.name for path in tmp_path.iterdir()} == {"pair"}, "nothing is left of it"


@pytest.mark.hostile("values")
def test_the_one_writer_refuses_what_verify_would(tiny, tmp_path):
    """tests/checks/test_verify.py has what else that is."""
    sound = calibrate(Job(str(tiny), RECIPE, tmp_path / "sound", device="cpu"))
    tensors, statistics = stored_rotations(sound), sound.statistics
    tensors["layers.1.key.rotation"] *= 1.001
    manifest = {k: v for k, v in sound.content.items() if k not in ("schema", "files")}
    content = rotations_from(tensors), statistics, manifest
    with pytest.raises(Unsound) as refused:
        write_sound_artifact(tmp_path / "out", *content, hint="make it again")
    assert str(refused.value) == (
        "not written, since it would not pass verify: key rotation not orthogonal: layer 1"
    )
    assert refused.value.hint == "make it again"
    assert not (tmp_path / "out").exists()
    before = (sound.folder / "manifest.json").read_bytes()
    with pytest.raises(Unsound):
        write_sound_artifact(sound.folder, *content, hint="make it again")
    assert (sound.folder / "manifest.json").read_bytes() == before, "what was there stays"
    assert verify(Artifact.open(sound.folder)).ok
