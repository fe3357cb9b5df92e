"""The claims of a manifest, and that no artifact is written that would not pass verify."""

from dataclasses import replace

import pytest
import torch
import yaml
from support import architectures
from support.jobs import job
from support.models import edited_weights, save_tiny
from support.tensors import stored_rotations

from rotationzoo.artifact.fit import fit
from rotationzoo.artifact.layout import rotations_from, sentences
from rotationzoo.artifact.store import Artifact
from rotationzoo.calibration.calibrate import calibrate
from rotationzoo.calibration.collect import collect
from rotationzoo.calibration.soundness import Claim, check, write_sound_artifact
from rotationzoo.checks.verify import verify
from rotationzoo.errors import RotationZooError, Unsound
from rotationzoo.linalg.moments import average
from rotationzoo.model.geometry import geometry_of
from rotationzoo.recipe import Data, Recipe
from rotationzoo.rotations import Rotations

BATCHES = [torch.randint(3, 59, (4, 32), generator=torch.Generator().manual_seed(0))]


@pytest.fixture(scope="module")
def sound():
    """A claim, with rotations and statistics for which it is true."""
    model = architectures.build("qwen3")
    recipe = Recipe(sink=4, center_values=True)
    geometry = geometry_of(model)
    statistics = collect(model, geometry, BATCHES, recipe)
    rotations = fit(statistics, recipe, geometry)
    return Claim(recipe, geometry), rotations, average(statistics)


def change_one(rotations: Rotations, layer: int, side: str, **changes) -> Rotations:
    """The rotations, with other fields in one of them."""

    def change(*given):
        return replace(given[2], **changes) if given[:2] == (layer, side) else given[2]

    return rotations.replace(change)


def test_imported_matrices_may_be_less_orthogonal(sound):
    claim, rotations, _ = sound
    scaled = change_one(rotations, 3, "value", matrix=rotations[3].value.matrix * 1.001)
    assert sentences(claim.side_problems(scaled, {})) == ["value rotation not orthogonal: layer 3"]
    assert not list(replace(claim, imported=True).side_problems(scaled, {}))
    nothing = change_one(rotations, 3, "value", matrix=rotations[3].value.matrix * float("nan"))
    assert sentences(claim.side_problems(nothing, {})) == ["value rotation not orthogonal: layer 3"]


def test_imported_matrices_are_not_compared_with_a_formula(sound):
    claim, rotations, averages = sound
    key = rotations[1].key
    moved = change_one(rotations, 0, "key", matrix=key.matrix, eigenvalues=key.eigenvalues)
    recipe = claim.recipe.model_copy(update={"composition": "given"})
    assert not list(replace(claim, recipe=recipe).origin_problems(moved, averages))


def test_a_damaged_geometry_is_refused(sound):
    claim, *tensors = sound
    content = {"recipe": claim.recipe.published(), "geometry": [{"depth": 3}]}
    with pytest.raises(RotationZooError, match="geometry in the manifest is damaged"):
        check(*tensors, content)


SMALL = Recipe(data=Data(tokens=512, length=128))
UNSOUND = "not written, since it would not pass verify"


@pytest.mark.hostile("values")
@pytest.mark.parametrize(
    ("side", "recipe"),
    [
        ("value", SMALL),
        ("value", SMALL.model_copy(update={"value_statistic": "value"})),
        ("key", SMALL),
    ],
)
def test_weights_too_large_for_float32_statistics(side, recipe, inside, tmp_path):
    model = save_tiny(tmp_path / "model")
    # Keys pass through a norm, whose own weight scales them.
    name = "q_norm" if side == "key" else "v_proj"
    with edited_weights(model) as weights:
        weights[f"model.layers.1.self_attn.{name}.weight"] *= 1e30
    content = yaml.safe_dump(recipe.model_dump() | {"transform": False})
    (inside.folder / "mine.yaml").write_text(content)
    words = ["calibrate", model, "--recipe", "mine.yaml", "--output", "made/out", "--device", "cpu"]
    done = inside(*words)
    assert done.returncode == 1
    first, second = done.stderr.splitlines()
    assert first == f"Error: {UNSOUND}: {side} eigenvalues not finite: layer 1"
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
    assert {path.name for path in tmp_path.iterdir()} == {"model", "pair"}, "and nothing of it"


@pytest.mark.hostile("values")
def test_nothing_is_written_that_verify_would_refuse(tiny, tmp_path):
    """tests/checks/test_verify.py has the other cases."""
    sound = calibrate(job(tiny, tmp_path / "sound", SMALL))
    tensors, statistics = stored_rotations(sound), sound.statistics
    tensors["layers.1.key.rotation"] *= 1.001
    manifest = {k: v for k, v in sound.content.items() if k not in ("schema", "files")}
    content = rotations_from(tensors), statistics, manifest
    with pytest.raises(Unsound) as refused:
        write_sound_artifact(tmp_path / "out", *content, hint="make it again")
    assert str(refused.value) == f"{UNSOUND}: key rotation not orthogonal: layer 1"
    assert refused.value.hint == "make it again"
    assert not (tmp_path / "out").exists()
    before = (sound.folder / "manifest.json").read_bytes()
    with pytest.raises(Unsound):
        write_sound_artifact(sound.folder, *content, hint="make it again")
    assert (sound.folder / "manifest.json").read_bytes() == before, "what was there stays"
    assert verify(Artifact.open(sound.folder)).ok
