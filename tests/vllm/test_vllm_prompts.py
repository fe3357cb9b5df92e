"""What prompts read in parts and merge: torch's attention, and vLLM's on a GPU."""

import pytest
import torch
from support.codec import on_gpu

from rotationzoo.codec.attention import Scores
from rotationzoo.vllm.prompts import Ragged, Read, TorchAttention

QUERIES, KEYS = [5, 1, 70, 30], [0, 300, 9, 64]


def packed(counts, *rows) -> Ragged:
    bounds = torch.tensor([0, *counts]).cumsum(0).int().to(rows[0].device)
    return Ragged(rows, bounds, max(counts))


def draw(dim, device, seed=0) -> list[torch.Tensor]:
    """Queries, keys and values of heads with `dim` channels, two query heads for each KV head."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (sum(QUERIES), 4, dim), (sum(KEYS), 2, dim), (sum(KEYS), 2, dim)
    rows = (torch.randn(shape, generator=generator) for shape in shapes)
    return [each.to(device, torch.bfloat16) for each in rows]


def test_nothing_read_is_merged_with_something_read():
    query, key, value = (each.float() for each in draw(16, "cpu"))
    attention, scores = TorchAttention(), Scores(0.25)
    own, keys = packed(QUERIES, query), packed(KEYS, key, value)
    read = attention.attend(own, keys, scores, False, torch.empty_like(query))
    assert read.totals[:, :5].eq(-torch.inf).all()
    assert not read.output[:5].any()
    nothing = Read(torch.zeros_like(query), torch.full_like(read.totals, -torch.inf))
    merged = attention.merge(read, nothing, torch.empty_like(query))
    assert torch.equal(merged.output, read.output)
    assert torch.equal(merged.totals, read.totals)


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


@on_gpu
@pytest.mark.parametrize("version", [2, 3])
def test_values_may_have_fewer_channels_than_keys(version, device):
    """As with latents."""
    flash = pytest.importorskip("rotationzoo.vllm.flash_attention")
    if not hasattr(
        getattr(torch.ops, f"_vllm_fa{version}_C"), "varlen_fwd" if version == 2 else "fwd"
    ):
        pytest.skip(f"this vLLM has no FlashAttention {version}")
    query, key, value = draw(192, device)
    given = packed(QUERIES, query), packed(KEYS, key, value[..., :128]), Scores(0.07), False
    outputs = []
    for attention in (flash.FlashAttention(version), TorchAttention()):
        output = torch.full_like(query[..., :128], torch.nan)
        outputs.append(attention.attend(*given, output).output.float())
    difference = (outputs[0] - outputs[1]).norm()
    assert difference / outputs[1].norm() < 0.01  # bfloat16's rounding


@on_gpu
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_key_that_is_no_number_reaches_its_readers_alone(dim, device):
    """With a value of zeros, as `restore.cu` writes it; also where another part is empty."""
    flash = pytest.importorskip("rotationzoo.vllm.flash_attention")
    scores = Scores(1.0)
    attention = flash.choose_attention(dim, torch.bfloat16, False, is_cuda=True)
    query, key, value = draw(dim, device)
    reads = []
    for is_bad in (False, True):
        if is_bad:  # the second token of the third prompt, whose neighbors share its tile
            key[301], value[301] = torch.nan, 0
        own, keys = packed(QUERIES, query), packed(KEYS, key, value)
        reads.append(attention.attend(own, keys, scores, False, torch.empty_like(query)))
    expected, found = reads
    readers = slice(6, 76)
    for first in (True, False):
        lowest = torch.full_like(found.totals, -torch.inf)
        empty = Read(torch.zeros_like(query), lowest)
        pair = (empty, found) if first else (found, empty)
        for output in (found.output, attention.merge(*pair, torch.empty_like(query)).output):
            assert output[readers].isnan().all()
            assert torch.equal(output[:6], expected.output[:6])
            assert torch.equal(output[76:], expected.output[76:])
