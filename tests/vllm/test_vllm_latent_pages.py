"""Pages of latents (MLA) without vLLM, against the cache in transformers."""

import pytest
import torch
from support.server_pages import DIM, OF_LATENTS, ROPE, SCORES, Server, query_of, settings_of

from rotationzoo.cache.layer import Padding, RotatedLayer
from rotationzoo.codec.attention import attend_rows
from rotationzoo.vllm.latents import absorb

CHUNKS = [20, 9, 1, 1, 14, 1]  # those of more than 8 tokens are prompts


def expand(latents, rope):
    """As kernels, takes no empty tensor."""
    assert len(latents)
    return absorb(latents, rope)


def lend_garbage(*sizes) -> list[torch.Tensor]:
    return [torch.full(shape, torch.nan, dtype=dtype) for shape, dtype in sizes]


def draw(tokens: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    key = torch.randn(tokens, 1, DIM + ROPE, generator=generator)
    return {"key": key, "value": key[..., :DIM]}


@pytest.mark.parametrize("segment", [7, 4096])
@pytest.mark.parametrize("format", ["vllm", "sglang", "segments"])
def test_new_tokens_read_what_the_cache_in_transformers_reads(format, segment):
    """Two requests: the steps of one are prompts while the other decodes."""
    settings = settings_of(format, geometry=OF_LATENTS)
    server, layers = Server(settings, segment=segment), {}
    server.reader.lend, server.reader._expand = lend_garbage, expand
    for request in "ab":
        server.begin(request)
        layers[request] = RotatedLayer(settings, 0, Padding())
    for number, count in enumerate(CHUNKS):
        rows = {"a": draw(count, number), "b": draw(CHUNKS[::-1][number], 9 + number)}
        outputs = server.run(rows)
        for request, new in rows.items():
            by_head = new["key"].transpose(0, 1)[None]
            latents, rope = layers[request].update(by_head[..., :DIM], by_head[..., DIM:])
            position = torch.arange(latents.shape[2])
            causal = position <= position[-len(new["key"]) :, None]
            query = query_of(new["key"]).transpose(0, 1)[None]
            key = torch.cat([latents, rope], -1)
            expected = attend_rows(query, key, latents, causal[None], SCORES)[0][0]
            assert (outputs[request].transpose(0, 1) - expected).abs().max() < 1e-4
    assert any(stream.head for layer in layers.values() for stream in layer.streams), "codes"


def test_rows_that_are_not_finite_are_counted_by_what_they_are():
    server = Server(settings_of(geometry=OF_LATENTS))
    server.begin("a")
    rows = draw(12, 0)
    rows["key"][3, 0, 0], rows["key"][4, 0, -1] = torch.inf, torch.nan
    server.run({"a": rows})
    assert server.layer.counted == ("latent", "rope")
    assert server.layer.bad[:, 0].tolist() == [1, 1]
