"""Attention over packed codes in float64, and how far an output is from it."""

from dataclasses import dataclass

import torch
from decode_cases import Inputs

from rotationzoo.codec.attention import PackedSide


def reference(inputs: Inputs) -> torch.Tensor:
    """What `attend` should return, in float64: each row of the batch by itself, over exactly those
    tokens that it reads."""
    packed, outputs = inputs.packed, []
    batch, heads, new, _ = inputs.query.shape
    for row in range(batch):
        parts = []
        for window in (inputs.head, inputs.tail):
            count = window.key.shape[2] if window.lengths is None else int(window.lengths[row])
            parts.append([side[row, :, :count].double() for side in (window.key, window.value)])
        length = int(packed.lengths[row])
        stored = [restore(side, row, length) for side in (packed.key, packed.value)]
        # The tail comes last, because its last tokens are those that queries do not all read.
        key, value = (torch.cat(sides, 1) for sides in zip(parts[0], stored, parts[1], strict=True))
        group = heads // key.shape[0]
        query = inputs.query[row].double().unflatten(0, (-1, group))
        logits = query @ key.mT[:, None] * inputs.scores.scale
        cap, sinks = inputs.scores.soft_cap, inputs.scores.sinks
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        later = torch.arange(new - 1, -1, -1, device=logits.device)[:, None]
        position = torch.arange(key.shape[1], device=logits.device)
        logits = logits.masked_fill(position >= key.shape[1] - later, -torch.inf)
        if sinks is not None:
            column = sinks.double().view(-1, group, 1, 1).expand(*logits.shape[:3], 1)
            logits = torch.cat([logits, column], -1)
        weights = logits.softmax(-1)[..., : key.shape[1]]
        outputs.append((weights @ value[:, None]).flatten(0, 1))
    return torch.stack(outputs)


def restore(side: PackedSide, row: int, length: int) -> torch.Tensor:
    """The first rows `[H, T, D]` of one row of the batch in the model's frame, float64."""
    pages = [side.layout.view(block[row : row + 1]) for block in side.blocks]
    rows = torch.cat([side.layout.dequantize(page)[0] for page in pages], 1)[:, :length]
    restored = rows.double() @ side.matrix.double()
    return restored if side.mean is None else restored + side.mean.double()[:, None]


@dataclass(frozen=True)
class Error:
    """Norms of differences over norms of the reference."""

    row: float
    """Of the worst row of the batch, over all heads, new tokens and channels."""
    head: float
    """Of the worst single vector, one head of one new token. NaN anywhere makes both infinite."""
    beyond: float
    """Of the worst row, without what rounding the output to its type costs by itself."""


def error_of(output: torch.Tensor, expected: torch.Tensor) -> Error:
    """The error of an output `[B, H_q, T, D_v]`."""
    difference = (output.double() - expected).nan_to_num(torch.inf, torch.inf, torch.inf)
    rows = difference.flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    heads = difference.norm(dim=-1) / expected.norm(dim=-1)
    rounded = (expected.to(output.dtype).double() - expected).flatten(1).norm(dim=1)
    beyond = (rows**2 - (rounded / expected.flatten(1).norm(dim=1)) ** 2).clamp(min=0).sqrt()
    return Error(rows.max().item(), heads.max().item(), beyond.max().item())
