"""A model built by hand that answers questions about its context: it copies what followed the same
six tokens earlier."""

from pathlib import Path

import torch
import transformers

from support.models import add_tokenizer

VOCABULARY, HEAD_DIM, BACK = 2048, 384, 6
DIM = 32  # of a token's code
THETA = 1e9
ANSWER = DIM * (BACK + 1)  # the slot after those of a token and of the six before it
CONSTANT = ANSWER + DIM
SHARP = 20.0  # how much sharper attention is than its scores
CHANNELS = HEAD_DIM // 2
# RoPE turns the pairs of channels from `STEADY` on by at most 0.07 radians in 2,048 tokens. Those
# before `POSITIONS` turn fast enough to tell a position from its neighbours.
STEADY, POSITIONS = CHANNELS - DIM * BACK // 2, 45


def save_induction(folder: Path) -> Path:
    """Layer 1 has a head for each of the six tokens before a position, and writes their codes
    beside the position's own. Layer 2 looks for a position whose six tokens before are the last six
    of the query, and copies the code of that position's token, which the head reads. Both layers
    have a single KV head."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=CONSTANT + 8, intermediate_size=4, num_hidden_layers=2,
        num_attention_heads=BACK, num_key_value_heads=1, head_dim=HEAD_DIM,
        max_position_embeddings=2048, rope_theta=THETA, bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.zero_()
        codes = torch.randn(VOCABULARY, DIM, generator=torch.Generator().manual_seed(0))
        codes /= codes.norm(dim=1, keepdim=True)
        model.model.embed_tokens.weight[:, :DIM] = codes
        model.model.embed_tokens.weight[:, CONSTANT] = 1
        model.lm_head.weight[:, ANSWER:CONSTANT] = 3 * codes
        first, second = (layer.self_attn for layer in model.model.layers)
        _read_codes(first)
        _read_codes(second)
        _look_back(first)
        _copy_what_followed(second)
    model.save_pretrained(folder)
    return add_tokenizer(folder)


def _read_codes(attention: torch.nn.Module) -> None:
    """Values are the tokens' own codes."""
    attention.v_proj.weight[torch.arange(DIM), torch.arange(DIM)] = 1


def _look_back(attention: torch.nn.Module) -> None:
    """Head h attends to the position h + 1 before its own, and writes the code into slot h + 1."""
    pairs, count = torch.arange(POSITIONS), torch.arange(DIM)
    attention.k_proj.weight[pairs, CONSTANT] = 1
    for head in range(BACK):
        angles = (head + 1) * THETA ** -(pairs / CHANNELS)
        rows = head * HEAD_DIM + pairs
        attention.q_proj.weight[rows, CONSTANT] = SHARP * torch.cos(angles)
        attention.q_proj.weight[rows + CHANNELS, CONSTANT] = -SHARP * torch.sin(angles)
        # Both normed inputs are about five times their codes.
        attention.o_proj.weight[DIM * (head + 1) + count, head * HEAD_DIM + count] = 0.1


def _copy_what_followed(attention: torch.nn.Module) -> None:
    """The codes of the last six tokens are the query, and those of the six before are the key."""
    steady = torch.arange(STEADY, CHANNELS)
    channels, count = torch.cat([steady, steady + CHANNELS]), torch.arange(DIM)
    slots = torch.arange(DIM * BACK)
    attention.q_proj.weight[channels, slots] = SHARP
    attention.k_proj.weight[channels, slots + DIM] = 1
    attention.o_proj.weight[ANSWER + count, count] = 1
