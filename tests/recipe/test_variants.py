"""The variants among which a search chooses."""

import pytest

from rotationzoo.errors import RotationZooError
from rotationzoo.recipe import (
    PRESETS,
    Recipe,
    Search,
    followed_recipes,
    from_dict,
    tries,
    variants,
    without,
)


def test_variants_are_all_combinations():
    best = PRESETS["best"]
    table = variants(best)
    assert next(iter(table)) == "r_h_pbr, keys centred"
    assert table["r_h_pbr, keys centred"] == best
    assert len(table) == len({recipe.hash for recipe in table.values()}) == 8
    other = table["hadamard, equalized"]
    assert (other.composition, other.center_keys, other.equalize) == ("hadamard", False, True)
    assert list(variants(PRESETS["best-uncentered"])) == ["r_h_pbr", "hadamard"]


@pytest.mark.parametrize("name", ["oscar", "oscar-clip", "oscar-v1-clip", "hadamard-clip"])
def test_a_recipe_that_names_no_others_has_one_variant(name):
    recipe = PRESETS[name]
    assert list(variants(recipe).values()) == [recipe]


def test_baselines_with_a_clip_search_may_be_centred_and_equalized():
    keys = {"extends": "hadamard-clip", "center_keys": True, "equalize": True}
    recipe = from_dict(keys, "mine.yaml")
    assert list(variants(recipe)) == ["hadamard, keys centred, equalized"]
    assert recipe.search == PRESETS["oscar-clip"].search == Search(heads=False)


def test_what_a_model_does_not_allow_is_in_no_variant():
    best = PRESETS["best"]
    assert tries(best, "center_keys")
    assert tries(best, "equalize")
    assert not tries(without(best, "equalize"), "equalize")
    assert list(variants(without(best, "center_keys"))) == [
        "r_h_pbr",
        "r_h_pbr, equalized",
        "hadamard",
        "hadamard, equalized",
    ]
    assert without(Recipe(center_keys=True), "center_keys") == Recipe()


def test_an_artifact_may_follow_any_variant_on_any_model():
    best = PRESETS["best"]
    hashes = {recipe.hash for recipe in followed_recipes(best)}
    plain = without(without(best, "center_keys"), "equalize")
    assert {best.hash, plain.hash, variants(plain)["hadamard"].hash} <= hashes
    assert PRESETS["best-uncentered"].hash not in hashes
    assert followed_recipes(PRESETS["oscar"]) == [PRESETS["oscar"]]


def test_recipes_of_earlier_versions_keep_their_hash():
    """`best` before a search had variants and prompts."""
    earlier = from_dict(
        {
            "extends": "best",
            "feedback": False,
            "search": dict.fromkeys(("composition", "center_keys", "equalize"), ()),
        },
        "mine.yaml",
    )
    assert earlier.hash == "d9bf24004e7f3272b88b2ddddb1a652779818f982bc97b77c06323ef6df45180"
    assert "prompts" not in earlier.published()["search"]
    changed = earlier.model_copy(update={"search": Search(prompts=10)})
    assert changed.hash != earlier.hash


def test_a_search_knows_the_compositions_that_it_tries():
    with pytest.raises(RotationZooError, match="did you mean 'hadamard'"):
        from_dict({"search": {"composition": ["hadamar"]}}, "mine.yaml")


def test_a_search_without_heads_leaves_rotations_pooled():
    recipe = from_dict({"extends": "oscar-v1", "search": {"heads": False}}, "mine.yaml")
    assert recipe.pooling == "layer"


def test_a_file_changes_single_keys_of_its_presets_search():
    keys = {"extends": "hadamard-clip", "search": {"prompts": 5}}
    preset = PRESETS["hadamard-clip"].search
    assert preset is not None
    assert from_dict(keys, "mine.yaml").search == preset.model_copy(update={"prompts": 5})
    without = from_dict({"extends": "hadamard-clip", "search": None}, "mine.yaml")
    assert without.search is None
