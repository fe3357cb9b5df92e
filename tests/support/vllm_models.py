"""Small random models that a vLLM serves, and what it drafts and adapts them with."""

from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from transformers import LlamaConfig

from rotationzoo.recipe import Recipe
from support.jobs import calibrate_short
from support.models import edited_weights, save_random
from support.recipes import QUICK

_SHAPE = dict(
    vocab_size=2048, hidden_size=128, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, max_position_embeddings=32768, bos_token_id=None, eos_token_id=0,
)  # fmt: skip
_WINDOWS = dict(
    num_hidden_layers=4, num_key_value_heads=2, head_dim=32, sliding_window=128,
    layer_types=["sliding_attention", "full_attention"] * 2, pad_token_id=None,
)  # fmt: skip
# name -> (the names of its classes without endings, options)
SERVED = {
    "one KV head": ("Llama", "Llama", dict(num_key_value_heads=1)),
    "biases": ("Qwen2", "Qwen2", dict(num_key_value_heads=2)),
    "a scale of its own": ("Granite", "Granite", dict(
        num_key_value_heads=4, attention_multiplier=0.4)),
    "windows and soft caps": ("Gemma2", "Gemma2", _WINDOWS | dict(query_pre_attn_scalar=32)),
    "windows and two RoPEs": ("Gemma3", "Gemma3Text", _WINDOWS | dict(query_pre_attn_scalar=32)),
    "windows and sinks": ("GptOss", "GptOss", _WINDOWS | dict(
        num_local_experts=4, num_experts_per_tok=2)),
    # DeepSeek V3 without experts.
    "latents": ("DeepseekV3", "DeepseekV3", dict(
        num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=128, qk_nope_head_dim=32,
        qk_rope_head_dim=16, v_head_dim=24, first_k_dense_replace=2)),
}  # fmt: skip
LARGE_LATENTS = dict(
    num_attention_heads=16, num_key_value_heads=16, kv_lora_rank=512,
    qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
)  # fmt: skip
"""The sizes of DeepSeek's, which the kernels of a GPU take."""


def save_served(name: str, folder: Path, **changes) -> transformers.PreTrainedModel:
    """One of `SERVED`, whose weights are large enough for attention to matter."""
    kind, config, options = SERVED[name]
    return save_random(kind, config, folder, std=0.1, **_SHAPE | options | changes)


def make_served(
    name: str, folder: Path, recipe: Recipe = QUICK, **changes
) -> tuple[transformers.PreTrainedModel, Path, Path]:
    """One of `SERVED`, its folder and its artifact."""
    model = save_served(name, folder / "model", **changes)
    made = calibrate_short(folder / "model", folder / "artifact", recipe)
    return model, folder / "model", made.folder


def save_head(folder: Path) -> Path:
    """An EAGLE head of random weights."""
    folder.mkdir()
    LlamaConfig(
        architectures=["LlamaForCausalLM"], vocab_size=2048, hidden_size=256, intermediate_size=512,
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        max_position_embeddings=8192,
    ).save_pretrained(folder)  # fmt: skip
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return 0.02 * torch.randn(size, generator=generator)

    layer = {f"self_attn.{side}_proj": draw(128, 256) for side in ("k", "v")}
    layer |= {f"self_attn.{side}_proj": draw(256, 256) for side in ("q", "o")}
    layer |= {f"mlp.{name}_proj": draw(512, 256) for name in ("gate", "up")}
    layer |= {"mlp.down_proj": draw(256, 512), "post_attention_layernorm": torch.ones(256)}
    weights = {f"layers.0.{name}.weight": weight for name, weight in layer.items()}
    weights["fc.weight"] = torch.cat([draw(256, 256), torch.eye(256)], 1)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def save_with_mtp(folder: Path) -> Path:
    """A random ERNIE 4.5 of one layer without experts, and an MTP head that does nearly the same
    after the embedding of a token: the head reads exact rows, and rotates them in another order."""
    save_random(
        "Ernie4_5_Moe", "Ernie4_5_Moe", folder, std=0.1, vocab_size=2048, hidden_size=128,
        intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, max_position_embeddings=4096, pad_token_id=None, bos_token_id=None,
        eos_token_id=None, tie_word_embeddings=False, moe_layer_start_index=1,
        num_nextn_predict_layers=1,
    )  # fmt: skip
    with edited_weights(folder) as weights:
        weights["model.embed_tokens.weight"] *= 10  # of size 1, as the head makes it
        layer = {name: each for name, each in weights.items() if ".layers.0." in name}
        for name, weight in layer.items():
            weights[name.replace("layers", "mtp_block")] = weight.clone()
        for name in ("emb", "hidden"):
            weights[f"model.mtp_{name}_norm.0.weight"] = torch.ones(128)
        weights["model.mtp_linear_proj.0.weight"] = torch.eye(128, 256)
    return folder


def save_latents_with_mtp(folder: Path) -> Path:
    """The same with latents, in sizes that a GPU's kernels take."""
    more = {"num_hidden_layers": 1, "first_k_dense_replace": 2, "num_nextn_predict_layers": 1}
    save_served("latents", folder, **LARGE_LATENTS, **more)
    with edited_weights(folder) as weights:
        weights["model.embed_tokens.weight"] *= 10
        head = "model.layers.1."
        layer = {name: each for name, each in weights.items() if ".layers.0." in name}
        for name, weight in layer.items():
            weights[name.replace("model.layers.0.", head)] = weight.clone()
        size = len(weights["model.norm.weight"])
        for name in ("enorm", "hnorm", "shared_head.norm"):
            weights[f"{head}{name}.weight"] = torch.ones(size)
        shared = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
        for name, source in shared.items():
            weights[f"{head}{name}.weight"] = weights[f"{source}.weight"].clone()
        weights[f"{head}eh_proj.weight"] = torch.eye(size, 2 * size)
    return folder


def save_adapter(folder: Path) -> Path:
    """A LoRA adapter of rank 8 for the demo model, large enough to change its answers."""
    from peft import LoraConfig, get_peft_model

    from rotationzoo.model.source import DEMO

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO)
    asked = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(model, asked).save_pretrained(folder)
    return folder
