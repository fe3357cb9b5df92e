"""Qwen3 models of published sizes with random weights, made on the device, and random text."""

import math
from dataclasses import dataclass

import torch
from measuring import DEVICE
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Shape:
    """The geometry of a Qwen3 model.

    `experts` is 0 for a dense model. Otherwise each token passes `active` of them, and
    `intermediate` is the width of one.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    experts: int = 0
    active: int = 1
    dim: int = 128
    vocabulary: int = 151_936
    positions: int = 40_960

    def config(self) -> Qwen3Config | Qwen3MoeConfig:
        """The config of transformers' model of this shape."""
        common = dict(
            num_hidden_layers=self.layers,
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.dim,
            vocab_size=self.vocabulary,
            max_position_embeddings=self.positions,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            rms_norm_eps=1e-6,
            tie_word_embeddings=False,
        )
        if not self.experts:
            return Qwen3Config(intermediate_size=self.intermediate, **common)
        return Qwen3MoeConfig(
            moe_intermediate_size=self.intermediate,
            num_experts=self.experts,
            num_experts_per_tok=self.active,
            norm_topk_prob=True,
            **common,
        )


# From config.json of Qwen3-8B, Qwen3-32B and Qwen3-30B-A3B on huggingface.co.
SHAPES = {
    "8b": Shape(36, 4096, 12_288, 32, 8),
    "32b": Shape(64, 5120, 25_600, 64, 8),
    "30b-a3b": Shape(48, 2048, 768, 32, 4, experts=128, active=8),
}


def make_model(shape: Shape, device: str = DEVICE) -> PreTrainedModel:
    """transformers' own model of a shape in bfloat16, in eval mode, with random weights.

    It is built on `meta` and filled on the device, so that no copy exists anywhere, in no other
    type. Each matrix keeps the variance of what it multiplies, and norms have weight 1; the
    router's scores are those of random tokens, so that all experts get about as many.
    """
    config = shape.config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPE, attn_implementation="sdpa")
    model.to_empty(device=device).eval()
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim < 2:
                weight.fill_(1)
            else:
                # Each token's embedding has entries of about 1: it is to matter in every layer.
                deviation = 1.0 if "embed_tokens" in name else 1 / math.sqrt(weight.shape[-1])
                weight.normal_(std=deviation, generator=generator)
    # Its buffers are computed from the config when it is made, and `meta` computes nothing.
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config=config).to(model.device)
    return model.requires_grad_(False)


def random_text(vocabulary: int, rows: int, length: int, device: str = DEVICE) -> torch.Tensor:
    """Token ids `[rows, length]`, all equally probable."""
    generator = torch.Generator(device).manual_seed(1)
    return torch.randint(vocabulary, (rows, length), generator=generator, device=device)
