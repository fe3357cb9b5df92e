"""Statistics computed directly from each layer's weights, to compare captured ones with.

For every layer the reference takes the hidden states that enter attention, applies the layer's
projections, norms and RoPE, builds the T x T softmax (with window, soft cap and sinks) and forms
Q^T Q and V^T S^T S V from it. It knows the module names of Llama, Mistral, Qwen2, Qwen3, Gemma 2
and gpt-oss; the capture under test knows none.
"""

from contextlib import ExitStack
from typing import Any

import torch
from transformers import PreTrainedModel

from rotationzoo.artifact.layout import statistics_tensors
from rotationzoo.calibration.collect import collect
from rotationzoo.linalg.moments import average
from rotationzoo.model.capture import decoder
from rotationzoo.model.geometry import geometry_of
from rotationzoo.recipe import Recipe

Attended = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Post-RoPE queries `[B, H_q, T, D]`, keys and values `[B, H_kv, T, D]`, softmax `[B, H_q, T, T]`,
all float64."""


@torch.no_grad()
def attention_of(model: PreTrainedModel, ids: torch.Tensor) -> dict[int, Attended]:
    """What each layer's attention reads and weighs for one batch `[B, T]`, from its weights
    alone."""
    found: dict[int, Attended] = {}

    def note(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        hidden, angles = kwargs["hidden_states"], kwargs["position_embeddings"]
        found[module.layer_idx] = _attend(module, hidden, angles)

    with ExitStack() as hooks:
        for layer in decoder(model).layers:
            hook = layer.self_attn.register_forward_pre_hook(note, with_kwargs=True)
            hooks.callback(hook.remove)
        decoder(model)(input_ids=ids, use_cache=False)
    return found


def _attend(
    attention: torch.nn.Module, hidden: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]
) -> Attended:
    """One layer's attention on hidden states `[B, T, hidden]`, with RoPE's cosines and sines."""
    split = (*hidden.shape[:2], -1, attention.head_dim)
    query = attention.q_proj(hidden).view(split)
    key = attention.k_proj(hidden).view(split)
    value = attention.v_proj(hidden).view(split).transpose(1, 2).double()
    if hasattr(attention, "q_norm"):
        query, key = attention.q_norm(query), attention.k_norm(key)
    query, key = (_rope(states.transpose(1, 2), *angles).double() for states in (query, key))
    groups = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(groups, 1).mT * attention.scaling
    if softcap := getattr(attention, "attn_logit_softcapping", None):
        scores = (scores / softcap).tanh() * softcap
    position = torch.arange(hidden.shape[1])
    distance = position[:, None] - position
    unseen = distance < 0
    of_config = getattr(attention.config, "sliding_window", None)
    if window := getattr(attention, "sliding_window", of_config):
        unseen = unseen | (distance >= window)
    scores = scores.masked_fill(unseen.to(scores.device), float("-inf"))
    if (sinks := getattr(attention, "sinks", None)) is not None:
        extra = sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        return query, key, value, torch.cat([scores, extra], -1).softmax(-1)[..., :-1]
    return query, key, value, scores.softmax(-1)


def _rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (i, i + D/2); gpt-oss hands over angles for one half only."""
    half = x.shape[-1] // 2
    cos, sin = cos[..., :half].unsqueeze(1), sin[..., :half].unsqueeze(1)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def direct_statistics(
    model: PreTrainedModel, batches: list[torch.Tensor], sink: int
) -> dict[str, torch.Tensor]:
    """`C_Q`, `C_S` and the key and value moments per layer and KV head, under the names of the
    artifact's statistics."""
    sums: dict[str, torch.Tensor] = {}
    counts: dict[str, int] = {}

    def add(name: str, total: torch.Tensor, count: int) -> None:
        sums[name] = sums.get(name, 0) + total
        counts[name] = counts.get(name, 0) + count

    for ids in batches:
        for layer, (query, key, value, softmax) in attention_of(model, ids).items():
            heads = key.shape[1]
            for batch in range(len(ids)):
                q = query[batch].unflatten(0, (heads, -1))
                s = softmax[batch].unflatten(0, (heads, -1))
                v, k = value[batch], key[batch]
                rows = q.shape[1] * q.shape[2]
                add(f"layers.{layer}.query.second_moment", (q.mT @ q).sum(1), rows)
                weights = (s.mT @ s).sum(1)  # sum over the group of S^T S, [H_kv, T, T]
                add(f"layers.{layer}.output.second_moment", v.mT @ weights @ v, rows)
                # The first tokens are never quantized, so their keys and values do not count.
                for side, stored in (("key", k[:, sink:]), ("value", v[:, sink:])):
                    count = stored.shape[1]
                    add(f"layers.{layer}.{side}.second_moment", stored.mT @ stored, count)
                    add(f"layers.{layer}.{side}.mean", stored.sum(1), count)
    return {name: (total / counts[name]).cpu() for name, total in sums.items()}


def largest_difference(
    model: PreTrainedModel, batches: list[torch.Tensor], sink: int
) -> dict[str, float]:
    """Kind of statistic -> the largest relative difference (Frobenius norm) over layers and
    heads."""
    direct = direct_statistics(model, batches, sink)
    with torch.no_grad():
        geometry = geometry_of(model, batches[0])
    captured = statistics_tensors(average(collect(model, geometry, batches, Recipe(sink=sink))))
    worst: dict[str, float] = {}
    for name, expected in direct.items():
        kind = name.split(".", 2)[2]
        dims = tuple(range(1, expected.ndim))
        error = (captured[name] - expected).norm(dim=dims) / expected.norm(dim=dims)
        worst[kind] = max(worst.get(kind, 0.0), error.max().item())
    return worst
