"""What a manifest claims, and each way in which rotations and statistics can contradict it."""

from dataclasses import replace

import pytest
import torch
from support import architectures

from rotationzoo.calibration.claim import Claim
from rotationzoo.calibration.collect import collect
from rotationzoo.calibration.fit import fit
from rotationzoo.errors import RotationZooError
from rotationzoo.linalg.moments import average
from rotationzoo.model.geometry import geometry_json, geometry_of
from rotationzoo.recipe import PRESETS, Recipe
from rotationzoo.rotations import LayerRotations, Rotations

BATCHES = [torch.randint(3, 59, (4, 32), generator=torch.Generator().manual_seed(0))]
ELSEWHERE = "rotations that do not come from the stored statistics"


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


def test_nothing_is_wrong_with_what_a_recipe_makes(sound):
    claim, rotations, averages = sound
    assert claim.layout_problems(rotations, averages) == []
    assert claim.orthogonality_problems(rotations) == []
    assert claim.clip_problems(rotations) == []
    assert claim.origin_problems(rotations, averages) == []
    assert claim.origin_problems(rotations, None) == []
    assert claim.mean_problems(rotations, averages) == []
    assert claim.centering_problems(rotations) == []


def test_tensors_of_other_shapes_are_found_on_both_sides(sound):
    claim, rotations, averages = sound
    missing = Rotations({layer: sides for layer, sides in rotations.items() if layer != 2})
    problems = claim.layout_problems(missing, averages)
    assert "key rotation missing: layer 2" in problems
    fewer = {layer: kinds for layer, kinds in averages.items() if layer != 1}
    assert "query second moment missing: layer 1" in claim.layout_problems(rotations, fewer)


def test_imported_matrices_may_be_less_orthogonal(sound):
    claim, rotations, _ = sound
    scaled = change_one(rotations, 3, "value", matrix=rotations[3].value.matrix * 1.001)
    assert claim.orthogonality_problems(scaled) == ["value rotation not orthogonal: layer 3"]
    assert replace(claim, imported=True).orthogonality_problems(scaled) == []
    nothing = change_one(rotations, 3, "value", matrix=rotations[3].value.matrix * float("nan"))
    assert claim.orthogonality_problems(nothing) == ["value rotation not orthogonal: layer 3"]


def test_clip_ratios_are_those_of_every_head(sound):
    claim, rotations, _ = sound
    clip = rotations[0].key.clip.clone()
    clip[-1] = 0.5
    changed = change_one(rotations, 0, "key", clip=clip)
    assert claim.clip_problems(changed) == ["key clip ratio not that of the recipe: layer 0"]
    other = claim.recipe.model_copy(update={"key_clip": 0.5, "value_clip": 0.5})
    assert replace(claim, recipe=other).clip_problems(rotations) == [
        "key clip ratio not that of the recipe: layers 0, 1, 2, 3",
        "value clip ratio not that of the recipe: layers 0, 1, 2, 3",
    ]


def test_where_rotations_come_from_is_told_by_their_statistics(sound):
    claim, rotations, averages = sound
    swapped = Rotations(
        {layer: LayerRotations(sides.value, sides.key) for layer, sides in rotations.items()}
    )
    problems = claim.origin_problems(swapped, averages)
    assert problems == ["key and value swapped: layers 0, 1, 2, 3"]
    other = rotations[1].key
    moved = change_one(rotations, 0, "key", matrix=other.matrix, eigenvalues=other.eigenvalues)
    assert claim.origin_problems(moved, averages) == [f"{ELSEWHERE}: layer 0"]
    eigenvalues = rotations[2].value.eigenvalues.flip(-1)
    flipped = change_one(rotations, 2, "value", eigenvalues=eigenvalues)
    assert claim.origin_problems(flipped, averages) == [f"{ELSEWHERE}: layer 2"]


def test_what_no_formula_makes_again_is_not_held_against_one(sound):
    claim, rotations, averages = sound
    key = rotations[1].key
    moved = change_one(rotations, 0, "key", matrix=key.matrix, eigenvalues=key.eigenvalues)
    recipe = claim.recipe.model_copy(update={"composition": "given"})
    assert replace(claim, recipe=recipe).origin_problems(moved, averages) == []


def test_rotations_without_statistics_are_made_again(sound):
    geometry = sound[0].geometry
    recipe = PRESETS["random"]
    claim, rotations = Claim(recipe, geometry), fit(None, recipe, geometry)
    assert claim.origin_problems(rotations, None) == []
    changed = change_one(rotations, 1, "value", matrix=rotations[0].value.matrix)
    problem = "value rotation not the one that random makes: layer 1"
    assert claim.origin_problems(changed, None) == [problem]


def test_means_are_those_of_the_statistics(sound):
    claim, rotations, averages = sound
    mean = rotations[3].value.mean + 1e-6
    changed = change_one(rotations, 3, "value", mean=mean)
    problem = "value mean not that of the statistics: layer 3"
    assert claim.mean_problems(changed, averages) == [problem]
    assert claim.mean_problems(changed, {}) == [], "nothing is known of it"


def test_keys_keep_their_mean_where_attention_reads_it(sound):
    claim, rotations, _ = sound
    geometry = [replace(layer, shift_invariant=layer.index != 2) for layer in claim.geometry]
    moved = replace(claim, geometry=geometry)
    assert moved.centering_problems(rotations) == []
    centered = change_one(rotations, 0, "key", mean=torch.zeros(2, rotations[0].key.dim))
    (problem,) = moved.centering_problems(centered)
    assert problem.startswith("keys are stored without their mean: attention depends on what all")
    assert "(layer 2)" in problem


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
