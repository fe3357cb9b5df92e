"""Scaled RoPE: the changed config, refusals, and that models use it."""

import pytest
import transformers
from support import architectures

from rotationzoo.errors import RotationZooError
from rotationzoo.recipe.rope import (
    apply_scaling,
    check_positions,
    longer_rows_hint,
    position_count,
    same_scaling,
    scaling_of,
)
from rotationzoo.recipe.schema import RopeScaling

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("text", "scaling"),
    [
        ("yarn:4", RopeScaling("yarn", 4)),
        ("yarn:4.0:32768", RopeScaling("yarn", 4, 32768)),
        ("linear:2.5", RopeScaling("linear", 2.5)),
    ],
)
def test_a_scaling_is_read_and_written(text, scaling):
    assert RopeScaling.parse(text) == scaling
    assert RopeScaling.parse(str(scaling)) == scaling


@pytest.mark.parametrize("text", ["yarn", "yarn:", "ntk:4", "yarn:x", "yarn:1", "yarn:4:0", ""])
def test_malformed_scalings_are_refused(text):
    with pytest.raises(ValueError, match="must"):
        RopeScaling.parse(text)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_oss", "gemma3", "qwen3_vl"])
def test_the_option_equals_the_config_entry(name):
    """The flag is the same as the entry in `config.json`, and changes what a model computes."""
    if not architectures.available(name):
        pytest.skip("not in this transformers")
    # gpt-oss already has YaRN, which is removed first.
    plain = {"rope_type": "default", "rope_theta": 1e4}
    changes = {"rope_parameters": plain} if name == "gpt_oss" else {}
    config = architectures.config(name, **changes)
    rope = config.get_text_config(decoder=True).rope_parameters
    before = {key: dict(value) for key, value in rope.items() if isinstance(value, dict)}
    assert scaling_of(config) is None
    apply_scaling(config, "yarn:4", name)
    assert scaling_of(config) == "yarn:4:64"
    assert position_count(config) == 256
    scaled = config.get_text_config(decoder=True).rope_parameters
    parameters = scaled.get("full_attention", scaled)
    assert {key: parameters[key] for key in YARN} == YARN
    if before:  # the windows of sliding layers do not grow
        assert scaled["sliding_attention"] == before["sliding_attention"]
    apply_scaling(config, "yarn:4", name)  # as it is already
    assert position_count(config) == 256


def test_a_model_that_was_scaled_so_has_the_scaling():
    plain = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 8)
    longrope = architectures.config("phi3", rope_parameters=plain | {"long_factor": [2.0] * 8})
    assert scaling_of(longrope) == "longrope", "which has no factor"
    for scaling in ("yarn:4", "yarn:4:32", "linear:4", "linear:4:32"):
        config = architectures.config("llama")
        apply_scaling(config, scaling, "it")
        present = scaling_of(config)
        assert same_scaling(scaling, present)
        assert not same_scaling(scaling.replace(":4", ":8"), present)
        apply_scaling(config, scaling, "it")


QWEN = dict(max_position_embeddings=512, rope_theta=1e6)
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=64,
)  # fmt: skip


@pytest.mark.parametrize(
    ("scaling", "positions"),
    [
        # As in the model card of Qwen, and with positions as in DeepSeek's config.
        (dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=512), 2048),
        (dict(rope_type="yarn", factor=2.0, original_max_position_embeddings=128), 512),
        (dict(type="yarn", factor=4.0), 2048),
        (dict(type="linear", factor=2.5), 1280),
        (dict(rope_type="dynamic", factor=8.0), 4096),
        (LLAMA3, 512),
        (None, 512),
    ],
    ids=str,
)
def test_positions_are_those_with_the_scaling(scaling, positions):
    config = transformers.Qwen3Config(rope_scaling=scaling, **QWEN)
    assert position_count(config) == positions
    check_positions(config, positions, "rows", "")
    with pytest.raises(RotationZooError, match=f"longer than the {positions} positions"):
        check_positions(config, positions + 1, "rows", "")


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize(("scaling", "positions"), [("linear:4", 256), ("linear:4:32", 128)])
def test_linear_scaling_multiplies_positions_once(name, scaling, positions):
    """The positions in Gemma 3's config include the factor."""
    config = architectures.config(name)
    for _ in range(2):
        apply_scaling(config, scaling, "it")
        assert position_count(config) == positions


def test_a_config_with_another_scaling_is_refused():
    config = architectures.config("llama", rope_parameters={**LLAMA3, "rope_theta": 1e4})
    with pytest.raises(RotationZooError, match=r"scales its RoPE already \(llama3:8:64\)") as no:
        apply_scaling(config, "yarn:4", "it")
    assert "leave" not in no.value.hint, "a recipe or rotations may have asked, and no option"
    assert "nor a recipe or rotations" in no.value.hint
    config = architectures.config("llama", rope_parameters={**YARN, "rope_theta": 1e4})
    with pytest.raises(RotationZooError, match="cannot be scaled by yarn:8"):
        apply_scaling(config, "yarn:8", "it")
    assert longer_rows_hint(config, 512, "add: --length 64") == "add: --length 64"
    with pytest.raises(RotationZooError, match=r"of it cannot be scaled by yarn:4: .*longrope"):
        apply_scaling(architectures.config("phi3"), "yarn:4", "it")


def test_a_model_without_rope_is_refused():
    config = architectures.config("gptj")
    with pytest.raises(RotationZooError, match="has no RoPE"):
        apply_scaling(config, "yarn:4", "it")
