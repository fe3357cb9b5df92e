"""Give a model the channel outliers of a large one, without changing what it computes.

    python scripts/lab/add_outliers.py MODEL OUTPUT [--seed 0] [--spread 0.6] [--count 2]
        [--octaves 2]

In each layer, every RoPE pair of key channels is multiplied by a power of two, and the same pair of
the query channels divided by it; every value channel is multiplied by a power of two, and its
column of the output projection divided by it. The exponents are normal with the deviation
`--spread`, rounded; `--count` pairs, and as many value channels, get `--octaves` more (values half
of it). The factors go into the query and key norms where a model has them, else into the rows of
the projections and their biases.

Powers of two are exact in every floating type, so the copy's logits are those of the model, bit by
bit; the script compares them and refuses to write anything else. It suits models whose layers have
`q_proj`, `k_proj`, `v_proj` and `o_proj` and whose RoPE turns channels i and i + D/2 into each
other: Llama, Mistral, Qwen2, Qwen3.
"""

import argparse
import copy
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from rotationzoo.model import loading
from rotationzoo.model.source import fetch, find

TOKENS = 256  # on which the copy is compared with the model


def draw_factors(
    shape: tuple[int, int], spread: float, count: int, octaves: int, draw: torch.Generator
) -> torch.Tensor:
    """Powers of two `[heads, channels]`, `count` of each head `octaves` higher."""
    exponents = (spread * torch.randn(shape, generator=draw)).round()
    towering = torch.rand(shape, generator=draw).topk(count).indices
    return torch.exp2(exponents.scatter_add(1, towering, torch.full(shape, float(octaves))))


def scale_outputs(linear: torch.nn.Linear, factors: torch.Tensor) -> None:
    """Multiply each output channel of a linear map, with its bias, by its factor."""
    linear.weight.mul_(factors.flatten()[:, None].to(linear.weight))
    if linear.bias is not None:
        linear.bias.mul_(factors.flatten().to(linear.bias))


@torch.no_grad()
def with_outliers(
    model: PreTrainedModel, seed: int = 0, spread: float = 0.6, count: int = 2, octaves: int = 2
) -> PreTrainedModel:
    """A copy of the model with outliers in the channels of its keys and values."""
    model, draw = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    for layer in model.model.layers:
        attention = layer.self_attn
        dim = attention.head_dim
        heads, queries = (p.out_features // dim for p in (attention.k_proj, attention.q_proj))
        normed = hasattr(attention, "k_norm")
        # One norm's weights serve all heads.
        pairs = draw_factors((1 if normed else heads, dim // 2), spread, count, octaves, draw)
        keys = pairs.repeat(1, 2)
        if normed:
            attention.k_norm.weight.mul_(keys[0].to(attention.k_norm.weight))
            attention.q_norm.weight.div_(keys[0].to(attention.q_norm.weight))
        else:
            scale_outputs(attention.k_proj, keys)
            scale_outputs(attention.q_proj, 1 / keys.repeat_interleave(queries // heads, 0))
        values = draw_factors((heads, dim), spread, count, octaves // 2, draw)
        scale_outputs(attention.v_proj, values)
        columns = values.repeat_interleave(queries // heads, 0).flatten()
        attention.o_proj.weight.div_(columns.to(attention.o_proj.weight))
    return model


@torch.no_grad()
def logit_difference(model: PreTrainedModel, other: PreTrainedModel) -> float:
    """The largest difference between two models' logits on random tokens."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, TOKENS), generator=draw)
    logits = [each(input_ids=ids, use_cache=False).logits for each in (model, other)]
    return (logits[0].double() - logits[1].double()).abs().max().item()


def write_copy(name: str, output: Path, seed: int = 0, *shape: Any) -> float:
    """Write a copy of a model with outliers, unless its logits differ from those of the model;
    returns by how much they do."""
    source = find(name)
    fetch(source)
    config = loading.load_config(source)
    model = loading.load(source, config, "cpu", config.dtype or torch.float32)
    scaled = with_outliers(model, seed, *shape)
    difference = logit_difference(model, scaled)
    if not difference:
        scaled.save_pretrained(output)
        loading.load_tokenizer(source).save_pretrained(output)
    return difference


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("output", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--spread", type=float, default=0.6)
    parser.add_argument("--count", type=int, default=2)
    parser.add_argument("--octaves", type=int, default=2)
    options = parser.parse_args()
    shape = options.spread, options.count, options.octaves
    difference = write_copy(options.model, options.output, options.seed, *shape)
    if difference:
        print(f"the copy's logits differ by {difference:.3g}: nothing was written", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
