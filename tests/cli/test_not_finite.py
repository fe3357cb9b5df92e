"""Weights with a number that is none: every command that runs the model names the first layer whose
output is not finite, and leaves nothing behind."""

from pathlib import Path

import pytest
import torch
from support.cases import quick_first
from support.command_line import SMALL, only_error
from support.models import edited_weights, save_tiny

QUICK = ["--quick", *SMALL]
LAYER = "layer 1 of Qwen3ForCausalLM returns numbers that are not finite"
AFTER = "what follows the last layer of Qwen3ForCausalLM returns numbers that are not finite"
DAMAGED = "Hint: fetch or save the weights again: they are damaged"

# One number of a tensor, and who is named.
PLACES = {
    "model.layers.1.mlp.down_proj.weight": (torch.nan, LAYER),
    "model.norm.weight": (torch.nan, AFTER),
    "lm_head.weight": (torch.nan, AFTER),
    "model.layers.1.self_attn.o_proj.weight": (torch.inf, LAYER),
}
COMMANDS = {
    "calibrate": QUICK,
    "calibrate with a budget": SMALL,
    "evaluate": ["--tokens", "1024", "--length", "512", "--tasks", "none"],
    "generate": ["--rotations", "none", "--prompt", "def read(self):", "--compare"],
}


@pytest.fixture(params=quick_first(PLACES))
def damaged(request, inside):
    """A model, and the words that name the place."""
    model, (number, words) = save_tiny(Path("damaged")), PLACES[request.param]
    with edited_weights(model) as weights:
        weights[request.param].view(-1)[3] = number
    return model, words


@pytest.mark.parametrize("command", COMMANDS)
def test_the_first_layer_that_is_not_finite_is_named(inside, damaged, command):
    model, words = damaged
    refused = inside(command.split()[0], model, *COMMANDS[command])
    assert refused.returncode == 1
    assert words in refused.stderr
    assert DAMAGED in refused.stderr
    assert not Path("rotations").exists()


def test_a_wider_type_is_only_proposed_where_there_is_one(inside):
    model = save_tiny(Path("damaged"))
    with edited_weights(model) as weights:
        weights["model.norm.weight"][3] = torch.nan
    refused = only_error(inside("calibrate", model, *QUICK, "--dtype", "bfloat16"))
    assert AFTER in refused
    assert "--dtype float32; if that does not help, fetch" in refused
