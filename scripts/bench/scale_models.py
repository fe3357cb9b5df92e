"""Models of published sizes with random weights, made on the device, and what benchmarks of them
share: random text, FLOPs, peak memory, and the matrix product that the device can do at best."""

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from measuring import DEVICE, seconds_of
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Shape:
    """The geometry of a Qwen3 model, from the `config.json` at `source`.

    `experts` is 0 for a dense model. Otherwise each token passes `active` of them, and
    `intermediate` is the width of one.
    """

    source: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    experts: int = 0
    active: int = 1
    dim: int = 128
    vocabulary: int = 151_936

    def config(self) -> Qwen3Config | Qwen3MoeConfig:
        """The config of transformers' model of this shape."""
        common = dict(
            num_hidden_layers=self.layers,
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.dim,
            vocab_size=self.vocabulary,
            max_position_embeddings=40_960,
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

    @property
    def matrix_weights(self) -> int:
        """The entries of the matrices of a layer that a token is multiplied by."""
        attention = 2 * self.hidden * self.dim * (self.heads + self.kv_heads)
        router = self.hidden * self.experts
        return attention + router + self.active * 3 * self.hidden * self.intermediate

    def forward_flops(self, rows: int, length: int) -> float:
        """FLOPs of the decoder without its head on `rows` rows of `length` tokens: two a weight and
        token, and `q k^T` and `s v` for each pair of positions that the causal mask shows."""
        pairs = length * (length + 1) / 2
        attention = 4 * self.heads * self.dim * pairs
        return self.layers * rows * (2 * self.matrix_weights * length + attention)

    def moment_flops(self, rows: int, length: int) -> float:
        """FLOPs of the second moments of queries, outputs, keys and values of these rows."""
        heads = 2 * (self.heads + self.kv_heads)
        return self.layers * rows * length * heads * 2 * self.dim**2


# From config.json of these models on huggingface.co.
SHAPES = {
    "8b": Shape("Qwen/Qwen3-8B", 36, 4096, 12_288, 32, 8),
    "32b": Shape("Qwen/Qwen3-32B", 64, 5120, 25_600, 64, 8),
    "30b-a3b": Shape("Qwen/Qwen3-30B-A3B", 48, 2048, 768, 32, 4, experts=128, active=8),
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


def random_text(shape: Shape, rows: int, length: int, device: str = DEVICE) -> torch.Tensor:
    """Token ids `[rows, length]`, all equally probable."""
    generator = torch.Generator(device).manual_seed(1)
    return torch.randint(shape.vocabulary, (rows, length), generator=generator, device=device)


def weight_bytes(model: PreTrainedModel) -> int:
    return sum(weight.numel() * weight.itemsize for weight in model.parameters())


def device_peak(job: Callable[[], object]) -> int:
    """The most bytes that were allocated on the device while a job ran; 0 on a CPU."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    job()
    return torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0


def median_ratio(times: Mapping[str, list[float]], job: str, base: str) -> float:
    """How many times as long a job took as another in the same turn: the median of all turns."""
    pairs = zip(times[job], times[base], strict=True)
    return statistics.median(seconds / plain for seconds, plain in pairs)


def matmul_peak(size: int = 8192, repeats: int = 20) -> float:
    """FLOP/s of a large bf16 matrix product on the device, the fastest of five runs."""
    if DEVICE == "cpu":
        size, repeats = min(size, 512), 2
    left, right = (torch.randn(size, size, dtype=DTYPE, device=DEVICE) for _ in range(2))
    output = torch.empty_like(left)

    def multiply() -> None:
        for _ in range(repeats):
            torch.matmul(left, right, out=output)

    multiply()
    fastest = min(seconds_of(multiply) for _ in range(5))
    return 2 * size**3 * repeats / fastest
