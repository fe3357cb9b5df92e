"""Which earlier tokens prompts read together, and vLLM's attention over them on a GPU."""

import pytest
import torch
from support.codec import on_gpu

from rotationzoo.codec.attention import Scores
from rotationzoo.vllm.prompts import Packed, TorchAttention
from rotationzoo.vllm.segments import plan_codes, plan_exact


@pytest.mark.parametrize(
    ("most", "groups"), [(8, [1, 2, 3, 4, 5]), (24, [2, 3, 4, 5])], ids=["one by one", "together"]
)
def test_every_token_is_read_once(most, groups):
    """Prompts without a context, in the sink alone, within the windows, and beyond them."""
    contexts, starts, recents = [0, 2, 9, 30, 21], [0, 2, 4, 4, 0], [0, 2, 5, 22, 21]
    new = [9, 2, 3, 4, 5]
    known, count = torch.tensor(contexts), torch.tensor(new)
    numbers = [torch.tensor(each, dtype=torch.int32) for each in (starts, recents, contexts)]
    exact = [*plan_exact(known, count, 12, *numbers, most=most)]
    codes = [*plan_codes(known, *numbers[:2], most=8)]
    assert [group.prompts.stop for group in exact] == groups
    read = []
    for group in exact:
        assert group.tokens.stop == sum(new[: group.prompts.stop])
        assert group.bounds.diff().tolist() == new[group.prompts]
        prompts, positions = group.read.positions()
        read += zip((prompts + group.prompts.start).tolist(), positions.tolist(), strict=True)
    for segment in codes:
        read += zip(*(each.tolist() for each in segment.positions()), strict=True)
    assert sorted(read) == [
        (prompt, at)
        for prompt, context in enumerate(contexts)
        for at in range(context + new[prompt])
    ]
    for segment in (*codes, *(group.read for group in exact)):
        held = segment.bounds.diff()
        assert int(held.sum()) <= segment.room
        assert int(held.max()) <= segment.longest
    assert all(segment.room <= 8 for segment in codes)


QUERIES, KEYS = [5, 1, 70, 30], [0, 300, 9, 64]


def packed(counts, *rows) -> Packed:
    bounds = torch.tensor([0, *counts]).cumsum(0).int().to(rows[0].device)
    return Packed(rows, bounds, max(counts))


def draw(dim, device, seed=0) -> list[torch.Tensor]:
    """Queries, keys and values of heads with `dim` channels, two query heads for each KV head."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (sum(QUERIES), 4, dim), (sum(KEYS), 2, dim), (sum(KEYS), 2, dim)
    rows = (torch.randn(shape, generator=generator) for shape in shapes)
    return [each.to(device, torch.bfloat16) for each in rows]


@on_gpu
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("kind", ["plain", "soft cap", "sinks"])
def test_flash_attention_reads_what_torch_reads(dim, kind, device):
    """A prompt that reads nothing, others that read few tokens or many, and both merged twice."""
    flash = pytest.importorskip("rotationzoo.vllm.flash_attention")
    sinks = torch.randn(4, device=device, dtype=torch.bfloat16) if kind == "sinks" else None
    scores = Scores(dim**-0.5, 20.0 if kind == "soft cap" else None, sinks)
    chosen = flash.choose_attention(dim, torch.bfloat16, sinks is not None, is_cuda=True)
    assert isinstance(chosen, flash.FlashAttention)
    read = []
    for attention in (chosen, TorchAttention()):
        merged = None
        for seed, causal in enumerate([False, True, False]):
            query, key, value = draw(dim, device, seed)
            own, keys, given = packed(QUERIES, query), packed(KEYS, key, value), scores
            if causal:
                keys = packed(QUERIES, *(rows[: sum(QUERIES)] for rows in (key, value)))
            else:  # sinks take part once
                given = Scores(scores.scale, scores.soft_cap)
            output = torch.full_like(query, torch.nan)
            part = attention.attend(own, keys, given, causal, output)
            if merged is not None:
                part = attention.merge(merged, part, torch.full_like(query, torch.nan))
            merged = part
            read.append(merged)
    for ours, definition in zip(read[:3], read[3:], strict=True):
        difference = (ours.output.float() - definition.output.float()).norm()
        assert difference / definition.output.float().norm() < 0.01  # bfloat16's rounding
        is_read = definition.totals > -torch.inf
        assert (ours.totals - definition.totals)[is_read].abs().max() < 0.02
