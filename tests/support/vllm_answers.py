"""The answers of a vLLM engine against transformers, through our cache and without it."""

from pathlib import Path

import torch
from transformers import DynamicCache

from rotationzoo import Artifact, RotatedCache
from rotationzoo.rotations import SIDES, LayerRotations
from support.vllm import CHUNK, TOKENS

# Log probabilities in float32, of sums in another order: 4e-6 on average and 6e-5 at most were
# measured where no code is that close to a half, and 1.4e-3 at most where one is. Rows that are
# read exact instead of from codes make 0.045 on average, and 2 at most.
CLOSE, FLIPPED = 1e-3, 0.1
FLIPPED_EARLY = 5e-3
"""On average, where all tokens read a code that flips: with AMX, 2.3e-3 was measured of pages that
another server computed, and 3.6e-3 of states. Elsewhere, it was 1e-6 and 2e-6."""


def cell_of(layer: LayerRotations) -> int:
    """The bytes of one token of one of two KV heads of a layer with transform coding: on average,
    rounded up. A row is whole words, with a scale of four bits."""
    bits = 4 * torch.stack([layer[side].widths.sum(-1) for side in SIDES])
    rows = (bits + 4 + 31) // 32 * 4 * (bits > 0)
    return max(1, -(-int(rows.sum()) // 2))


def differences(found: list[float], expected: list[float]) -> torch.Tensor:
    return (torch.tensor(found) - torch.tensor(expected)).abs()


def assert_same(found: list[float], expected: list[float], close: float = CLOSE) -> None:
    difference = differences(found, expected)
    print(f"measured {difference.mean():.1e}, at most {difference.max():.1e}")
    assert difference.mean() < close
    assert difference.max() < FLIPPED


def assert_answers(artifact: Path, model, answers: list[dict], chunk=CHUNK) -> None:
    """That answers are those of the cache in transformers, with the same cached prefixes."""
    for answer in answers:
        cut = answer["cached"]
        expected = read_in_transformers(artifact, model, answer["ids"], chunk=chunk, cut=cut)
        assert_same(answer["answer"], expected[-TOKENS:])


def read_in_transformers(artifact: Path, model, ids: list[int], tokens=TOKENS, chunk=CHUNK, cut=0):
    """The log probability of each token but the first: a prompt in chunks, one of which begins at
    `cut`, then tokens one by one."""
    row, prompt = torch.tensor(ids, device=model.device)[None], len(ids) - tokens
    cache = RotatedCache(Artifact.open(artifact), model, engine="vllm")
    for index, layer in enumerate(DynamicCache(config=model.config).layers):
        if getattr(layer, "is_sliding", False):  # which vLLM's own backend serves
            cache.layers[index] = layer
    expected, at = [], 0
    while at < len(ids) - 1:
        end = min(at + chunk, cut if at < cut else prompt) if at < prompt else at + 1
        with torch.no_grad():
            logits = model(row[:, at:end], past_key_values=cache).logits[0]
        following = row[0, at + 1 : end + 1]
        read = logits[: len(following)].log_softmax(-1)
        expected += read.gather(1, following[:, None])[:, 0].tolist()
        at = end
    return expected


def read_exact(model, ids: list[int]) -> list[float]:
    """The log probability of each token but the first."""
    row = torch.tensor(ids, device=model.device)
    with torch.no_grad():
        read = model(row[None]).logits[0, :-1].log_softmax(-1)
    return read.gather(1, row[1:, None])[:, 0].tolist()


def read_loaded(artifact: Path, model, ids: list[int], held: int) -> list[float]:
    """The log probability after the first `held` + 1 tokens. Another server stored the first `held`
    in chunks, and they are read from codes alone."""
    row = torch.tensor(ids, device=model.device)[None]
    cache = RotatedCache(Artifact.open(artifact), model, engine="vllm")
    codec, layout, given = cache.settings.codec, cache.settings.layout, {}
    for index, layer in enumerate(cache.layers):
        layer.update = _noting(layer.update, given.setdefault(index, []))
    loaded = DynamicCache(config=model.config)
    with torch.no_grad():
        for at in range(0, held, CHUNK):
            model(row[:, at : min(at + CHUNK, held)], past_key_values=cache)
        for index, calls in given.items():
            rows = (torch.cat(each, 2) for each in zip(*calls, strict=True))
            # Both leave the mean of keys out, which those of later tokens have here.
            stored = (
                codec.fake_quantize(each, index, side, layout.format)
                + (each - codec.keep_exact(each, index, side))
                for each, side in zip(rows, SIDES, strict=True)
            )
            loaded.update(*stored, index)
        logits = model(row[:, held:-1], past_key_values=loaded).logits[0].log_softmax(-1)
    return logits.gather(1, row[0, held + 1 :, None])[:, 0].tolist()


def _noting(update, calls: list):
    """A layer's `update`, which notes its keys and values."""

    def note(keys, values, *given, **others):
        calls.append((keys, values))
        return update(keys, values, *given, **others)

    return note
