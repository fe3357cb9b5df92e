"""How a gpt-oss is trained without a matrix of T x T scores and without a loop over its experts.

transformers' attention with learned sinks is eager, or needs a kernel that only some GPUs have; its
experts are a loop whose shapes torch.compile does not know. `train_densely` gives a model functions
that compute the same from dense products of known shapes. A saved model does not name them.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import eager_mask
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

NAME = "rotationzoo_lab"
PAD = 8  # the channels that hold the sink; kernels want multiples of eight


def train_densely(model: PreTrainedModel) -> None:
    """Let a gpt-oss compute what it does through the functions below."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, eager_mask)
    ALL_EXPERTS_FUNCTIONS.register(NAME, mix_all_experts)
    model.set_attn_implementation(NAME)
    model.set_experts_implementation(NAME)


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Causal attention `[B, T, H, D]` of queries `[B, H, T, D]`, as an attention function of
    transformers. With a mask, which `loss_of` never makes, it is the model's own eager attention.

    A sink is one more key, whose score is the sink: a channel that is 1 in all queries meets
    `sink / scaling` there and 0 in all other keys. Its value is 0.
    """
    if attention_mask is not None:
        return eager_attention_forward(module, query, key, value, attention_mask, **options)
    scaling, window = options["scaling"], options["sliding_window"]
    rows, heads, tokens, dim = query.shape
    key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    allowed = None
    if window is not None and tokens > window:
        query, key, value = cut_blocks(query, key, value, window)
        allowed = allow_window(tokens, window, query.device).repeat(rows, 1, 1)[:, None]
    else:  # a query beside the sink, or else the causal mask would stand one key too far left
        query = functional.pad(query, (0, 0, 1, 0))
    one = torch.zeros(PAD, device=query.device, dtype=query.dtype)
    one[0] = 1
    sink = functional.pad((options["s_aux"] / scaling).to(key.dtype)[:, None] * one, (dim, 0))
    sink = sink[None, :, None].expand(len(key), -1, -1, -1)
    query = torch.cat([query, one.expand(*query.shape[:-1], -1)], dim=-1)
    key = torch.cat([sink, functional.pad(key, (0, PAD))], dim=2)
    value = functional.pad(value, (0, PAD, 1, 0))
    output = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=allowed, is_causal=allowed is None, scale=scaling
    )[..., :dim]
    if allowed is None:
        return output[:, :, 1:].transpose(1, 2).contiguous(), None
    output = output.unflatten(0, (rows, -1)).permute(0, 1, 3, 2, 4)
    return output.reshape(rows, tokens, heads, dim), None


def cut_blocks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries `[B * T / W, H, W, D]` in blocks of a window, and the keys and values of the same
    block and of the one before it `[B * T / W, H, 2 W, D]`."""

    def blocks(states: torch.Tensor) -> torch.Tensor:
        return states.unflatten(2, (-1, window)).transpose(1, 2)

    def pairs(states: torch.Tensor) -> torch.Tensor:
        own = blocks(states)
        before = functional.pad(own, (0, 0, 0, 0, 0, 0, 1, 0))[:, :-1]
        return torch.cat([before, own], dim=3).flatten(0, 1)

    return blocks(query).flatten(0, 1), pairs(key), pairs(value)


def allow_window(tokens: int, window: int, device: torch.device) -> torch.Tensor:
    """Which of the sink and `2 W` keys each query of each block attends to,
    `[T / W, W, 1 + 2 W]`."""
    keys = torch.arange(2 * window, device=device)
    distance = torch.arange(window, device=device)[:, None] + window - keys
    inside = (distance >= 0) & (distance < window)
    first = torch.arange(tokens // window, device=device) == 0
    inside = inside & ~(first[:, None, None] & (keys < window))
    return functional.pad(inside, (1, 0), value=True)


def mix_all_experts(
    module: nn.Module, states: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The weighted sum of all experts' outputs `[T, C]`. An expert that a token did not choose has
    no weight in it, so this is for models whose tokens choose all or most."""
    shares = weights.new_zeros(len(states), module.num_experts).scatter(1, experts, weights)
    each = states.expand(module.num_experts, -1, -1)
    gates = torch.bmm(each, module.gate_up_proj) + module.gate_up_proj_bias[:, None]
    outputs = torch.bmm(module._apply_gate(gates), module.down_proj)
    outputs = outputs + module.down_proj_bias[:, None]
    return (outputs * shares.T[..., None]).sum(0).to(states.dtype)
