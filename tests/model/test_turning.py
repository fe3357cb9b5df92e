"""What keys were before RoPE, and what their mean before it is at each position."""

import pytest
import torch
import transformers
from support import architectures
from support.architectures import families
from support.models import attention_calls, load_saved, save_family

from rotationzoo.model.geometry import geometry_of
from rotationzoo.model.turning import find_turnings

# All channels are turned, or some; sliding layers have a RoPE of their own.
TURNED = ("llama", "phi3", "gemma3", "gemma4", "glm4_moe", "minimax_m2", "doge")
SMALL = dict(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, pad_token_id=0,
)  # fmt: skip


def check_turning_back(model) -> None:
    """All positions of a row of one token have the same key before RoPE."""
    turnings = find_turnings(model, geometry_of(model))
    for layer, [(_, key, *_)] in attention_calls(model, [torch.full((1, 40), 5)]).items():
        key = key.double()
        before = turnings[layer].turn_back(key)
        largest = key.abs().max()
        assert (key - key[:, :, :1]).abs().max() > largest / 2
        # 2e-6 was measured.
        assert (before - before[:, :, :1]).abs().max() < 1e-5 * largest


@families(TURNED)
def test_keys_are_turned_back(name):
    check_turning_back(architectures.build(name))


@families(("llama", "gemma3", "glm4_moe"))
def test_frequencies_are_not_rounded_to_a_models_type(name, tmp_path):
    folder, found = save_family(name, tmp_path), []
    for dtype in (torch.float32, torch.bfloat16):
        model = load_saved(folder, dtype)
        found.append(find_turnings(model, geometry_of(model)))
    assert found[0].keys() == found[1].keys() != set()
    for layer, turning in found[0].items():
        assert torch.equal(turning.frequencies, found[1][layer].frequencies)


def test_interleaved_pairs_and_scaled_angles_are_turned_back():
    torch.manual_seed(0)
    check_turning_back(transformers.CohereForCausalLM(transformers.CohereConfig(**SMALL)).eval())
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    yarn["original_max_position_embeddings"] = 512
    check_turning_back(architectures.build("llama", rope_parameters=yarn))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_angles_that_depend_on_the_length_are_left_out(kind):
    half = SMALL["hidden_size"] // SMALL["num_attention_heads"] // 2
    scaled = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    if kind == "longrope":
        scaled |= {"short_factor": [1.0] * half, "long_factor": [4.0] * half}
        scaled["original_max_position_embeddings"] = 512
    config = transformers.LlamaConfig(**SMALL, rope_parameters=scaled)
    model = transformers.LlamaForCausalLM(config)
    assert find_turnings(model, geometry_of(model)) == {}


def test_a_moment_before_rope_spreads_over_positions():
    model = architectures.build("glm4_moe")
    turning = find_turnings(model, geometry_of(model))[0]
    dim, start, stop = len(turning.frequencies), 4, 20
    root = torch.randn(2, dim, dim, dtype=torch.float64)
    identity = torch.eye(dim, dtype=torch.float64)
    back = turning.turn_back(identity[:, None].expand(-1, stop, -1))[:, start:]
    turn = back.permute(1, 0, 2)  # orthogonal, so its transpose turns back
    every = turn @ (root @ root.mT)[:, None] @ turn.mT
    torch.testing.assert_close(turning.spread(root @ root.mT, start, stop), every.mean(1))
