"""What a manifest claims, and each way in which rotations and statistics can contradict it."""

from dataclasses import replace

import pytest
import torch
from support import architectures

from rotationzoo.artifact.tensor_check import sentences
from rotationzoo.calibration.claim import Claim
from rotationzoo.calibration.collect import collect
from rotationzoo.calibration.fit import fit
from rotationzoo.errors import RotationZooError
from rotationzoo.linalg.moments import average
from rotationzoo.model.geometry import geometry_json, geometry_of
from rotationzoo.recipe import Recipe
from rotationzoo.rotations import Rotations

BATCHES = [torch.randint(3, 59, (4, 32), generator=torch.Generator().manual_seed(0))]


@pytest.fixture(scope="module")
def sound():
    """A claim, with rotations and statistics of which it holds."""
    model = architectures.build("qwen3")
    recipe = Recipe(sink=4, center_values=True)
    geometry = geometry_of(model)
    statistics = collect(model, geometry, BATCHES, recipe)
    rotations = fit(statistics, recipe, geometry)
    return Claim(recipe, geometry), rotations, average(statistics)


def change_one(rotations: Rotations, layer: int, side: str, **changes) -> Rotations:
    """With other fields in one rotation."""
    return rotations.replace(
        lambda index, of, rotation: (
            replace(rotation, **changes) if (index, of) == (layer, side) else rotation
        )
    )


def test_imported_matrices_may_be_less_orthogonal(sound):
    claim, rotations, _ = sound
    scaled = change_one(rotations, 3, "value", matrix=rotations[3].value.matrix * 1.001)
    assert sentences(claim.orthogonality_problems(scaled)) == [
        "value rotation not orthogonal: layer 3"
    ]
    assert not list(replace(claim, imported=True).orthogonality_problems(scaled))
    nothing = change_one(rotations, 3, "value", matrix=rotations[3].value.matrix * float("nan"))
    assert sentences(claim.orthogonality_problems(nothing)) == [
        "value rotation not orthogonal: layer 3"
    ]


def test_what_no_formula_makes_again_is_not_held_against_one(sound):
    claim, rotations, averages = sound
    key = rotations[1].key
    moved = change_one(rotations, 0, "key", matrix=key.matrix, eigenvalues=key.eigenvalues)
    recipe = claim.recipe.model_copy(update={"composition": "given"})
    assert not list(replace(claim, recipe=recipe).origin_problems(moved, averages))


def test_a_manifest_claims_its_recipe_and_geometry(sound):
    claim, _, _ = sound
    content = {
        "recipe": claim.recipe.published(),
        "geometry": geometry_json(claim.geometry),
    }
    assert Claim.from_manifest(content) == claim
    assert Claim.from_manifest({**content, "imported": {}}).imported
    with pytest.raises(RotationZooError, match="geometry in the manifest is damaged"):
        Claim.from_manifest({**content, "geometry": [{"depth": 3}]})
