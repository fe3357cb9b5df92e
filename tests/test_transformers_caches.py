"""How the benchmarks read transformers' quantized caches: as `generate` does, one token at a
time."""

import torch
import transformers_caches
from support import architectures
from transformers import Cache
from transformers.cache_utils import QuantizedLayer
from transformers_caches import ThroughCache, TransformersCache

IDS = torch.randint(3, 59, (2, 100), generator=torch.Generator().manual_seed(1))
RESIDUAL = 8


class CoarseLayer(QuantizedLayer):
    """A layer with one scale for the whole tensor, in place of libraries that are not installed."""

    def _quantize(self, tensor, axis):
        scale = tensor.abs().amax() / 3
        return (tensor / scale).round(), scale

    def _dequantize(self, quantized):
        codes, scale = quantized
        return codes * scale


class CoarseRows(transformers_caches._RowByRow, CoarseLayer):
    pass


def read_one_by_one(model, row: torch.Tensor, start: int) -> torch.Tensor:
    """Logits of a prefill of `start` tokens and of every token after it."""
    layers = [CoarseLayer(residual_length=RESIDUAL) for _ in model.model.layers]
    past = Cache(layers=layers)
    model(input_ids=row[:, :start], past_key_values=past)
    steps = row[:, start:].split(1, dim=1)
    return torch.cat([model(input_ids=ids, past_key_values=past).logits for ids in steps], dim=1)


@torch.no_grad()
def test_pieces_of_a_batch_are_read_as_single_tokens_are(monkeypatch):
    model = architectures.build("qwen3")
    cache = TransformersCache("hqq", 2, axis=0, residual=RESIDUAL)
    monkeypatch.setattr(transformers_caches, "_HQQLayer", CoarseRows)
    logits = ThroughCache(model, cache)(input_ids=IDS, logits_to_keep=30).logits
    assert cache.prefix(100, 30) == 64
    expected = torch.cat([read_one_by_one(model, row, 64)[:, -30:] for row in IDS.split(1)])
    # Measured: 1.2e-5, of logits up to 10.
    assert (logits - expected).abs().max() < 1e-4
    exact = model(input_ids=IDS).logits[:, -30:]
    assert (logits - exact).abs().max() > 0.01
