"""Small models in which layers with states stand beside those with keys and values, or in them."""

from pathlib import Path

import transformers

from rotationzoo.budget import Budget
from rotationzoo.recipe.loading import with_budget
from support.jobs import calibrate_short
from support.models import save_random
from support.recipes import CODED, QUICK

_MOSTLY_STATES = ["linear_attention"] * 3 + ["full_attention"]
_DELTA = dict(
    head_dim=32, layer_types=_MOSTLY_STATES, linear_num_value_heads=4, linear_num_key_heads=2,
    linear_key_head_dim=64, linear_value_head_dim=64,
)  # fmt: skip
_MAMBA = dict(
    mamba_n_heads=8, mamba_d_head=32, mamba_n_groups=1, mamba_d_state=32, mamba_chunk_size=64
)
# name -> (model class without its ending, config class without its ending, options)
_MODELS = {
    "qwen3_next": ("Qwen3Next", "Qwen3Next", _DELTA | dict(
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64,
        shared_expert_intermediate_size=64)),
    "qwen3_5": ("Qwen3_5", "Qwen3_5Text", _DELTA),
    "jamba": ("Jamba", "Jamba", dict(
        num_experts=2, num_experts_per_tok=1, attn_layer_period=4, attn_layer_offset=3)),
    "nemotron_h": ("NemotronH", "NemotronH", dict(
        head_dim=32, layers_block_type=["mamba", "attention", "mlp", "mamba"], mamba_num_heads=8,
        mamba_head_dim=32, ssm_state_size=32, n_groups=2, chunk_size=64)),
    "falcon_h1": ("FalconH1", "FalconH1", _MAMBA | dict(
        head_dim=32, mamba_d_ssm=128, mamba_n_heads=4)),
    "granite_h": ("GraniteMoeHybrid", "GraniteMoeHybrid", _MAMBA | dict(
        layer_types=["mamba", "mamba", "mamba", "attention"], num_local_experts=0,
        shared_intermediate_size=128)),
    "lfm2": ("Lfm2", "Lfm2", dict(
        layer_types=["conv", "full_attention", "conv", "full_attention"], conv_dim=128,
        block_dim=128, block_multiple_of=32, block_auto_adjust_ff_dim=False, block_ff_dim=128)),
}  # fmt: skip
CACHED = {
    "falcon_h1": [0, 1, 2, 3],
    "lfm2": [1, 3],
    "qwen3_next": [3],
    "qwen3_5": [3],
    "jamba": [3],
    "nemotron_h": [1],
    "granite_h": [3],
}
"""The layers of each that hold keys and values."""


def save_hybrid(name: str, folder: Path) -> transformers.PreTrainedModel:
    """A random model of four layers, whose weights are large enough for attention to matter."""
    kind, config, options = _MODELS[name]
    base = dict(
        vocab_size=2048, hidden_size=128, intermediate_size=128, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32768,
        bos_token_id=None, eos_token_id=0, pad_token_id=None,
    )  # fmt: skip
    return save_random(kind, config, folder, std=0.1, **base | options)


def calibrate_hybrid(name: str, folder: Path, bits: float | None = None) -> tuple:
    """Such a model, its folder and its artifact."""
    model = save_hybrid(name, folder / name)
    recipe = QUICK if bits is None else with_budget(CODED, Budget(bits))
    made = calibrate_short(folder / name, folder / f"{name}-artifact", recipe, tokens=1024)
    return model, folder / name, made
