"""Estimates the memory that evaluating one batch of texts takes beside the model's weights, from
the shapes of the model and the length of the texts.

Each term counts tensors that exist at the same time. All of them grow with the length, and none
with its square.
"""

from dataclasses import dataclass

import torch
from transformers import PretrainedConfig, PreTrainedModel

from rotationzoo.calibration.memory import total_memory
from rotationzoo.errors import RotationZooError
from rotationzoo.evaluation.heads import COMPARED_TOKENS
from rotationzoo.model.geometry import Geometry, Layer
from rotationzoo.model.long_masks import BLOCK_QUERIES
from rotationzoo.model.prediction import BLOCK_LOGITS
from rotationzoo.model.quantized import quantization_of
from rotationzoo.simulation.masks import KEPT_BYTES
from rotationzoo.simulation.simulated import SCORES, TOKENS
from rotationzoo.text.rows import Corpus

_CODEC = 10  # simultaneous float32 tensors as large as the rows that are quantized
_DIVERGENCE = 16  # bytes of float32 and float64 copies for each score
# Simultaneous tensors as large as the scores of a block of queries. Measured on a CPU for each
# score: 9.1 bytes (Gemma 2) and 13.1 (gpt-oss) in float32, 10.6 and 6.6 in bfloat16.
_EAGER = 3
_MASK = 8  # bytes a position of a block's mask takes while it is made and read

_CERTAIN = 0.75
"""The share of an estimate that is certainly needed: a job is refused by no more than that."""


@dataclass(frozen=True)
class EvaluationFootprint:
    """Estimated sizes of one batch, in bytes."""

    geometry: Geometry
    config: PretrainedConfig
    length: int
    """Tokens per text."""
    item: int
    """Bytes per activation element."""
    batch: int = 1
    queries: int = 32
    """Queries whose attention is compared; 0 for none."""

    @property
    def peak(self) -> int:
        """Peak memory beside the weights, with one arm."""
        layers = max((self._layer(layer) for layer in self.geometry), default=0)
        return KEPT_BYTES + self._states + max(layers, self._feed_forward, self._head)

    @property
    def _tokens(self) -> int:
        return self.batch * self.length

    @property
    def _text(self) -> PretrainedConfig:
        return self.config.get_text_config(decoder=True)

    @property
    def _states(self) -> int:
        """The residual stream, and a normed copy of it."""
        states: int = 3 * self._tokens * self._text.hidden_size * self.item
        return states

    @property
    def _feed_forward(self) -> int:
        inner = getattr(self._text, "intermediate_size", None) or 4 * self._text.hidden_size
        if not isinstance(inner, int):  # some models have one size per layer
            inner = max(inner)
        gated: int = 3 * self._tokens * inner * self.item
        return gated

    @property
    def _head(self) -> int:
        """A block of logits, in float32 twice."""
        logits: int = min(BLOCK_LOGITS, self._tokens * self._text.vocab_size)
        return logits * (self.item + 2 * 4)

    def _layer(self, layer: Layer) -> int:
        """One layer's attention: its own tensors with both copies of the cache, and beside them
        whichever of the parts that follow each other takes most."""
        widths = layer.key_dim + layer.value_dim
        query, cache = layer.query_heads * widths, layer.kv_heads * widths
        rows = (query + 3 * cache) * self._tokens * self.item
        codec = _CODEC * 4 * layer.kv_heads * widths // 2 * min(self._tokens, self.batch * TOKENS)
        # The layer's output is kept while the same queries read the exact cache.
        kept = layer.query_heads * layer.value_dim * self._tokens * self.item
        compared = kept + max(self._reading(layer), self._comparison(layer))
        return rows + max(codec, self._divergence(layer), compared)

    def _reading(self, layer: Layer) -> int:
        """What a block of queries reads: keys and values, picked and repeated for each query head,
        and the mask; with eager attention also the scores."""
        widths = layer.key_dim + layer.value_dim
        picked = (layer.kv_heads + layer.query_heads) * widths * self._tokens * self.item
        mask = _MASK * BLOCK_QUERIES * self.length
        if self._text._attn_implementation != "eager":
            return picked + mask
        scores = self.item * layer.query_heads * BLOCK_QUERIES * self._tokens
        return picked + mask + _EAGER * scores

    def _divergence(self, layer: Layer) -> int:
        """The comparison of attention weights: both copies of the keys in float32, once as they are
        and once for every query head, and the scores of some queries."""
        if not self.queries:
            return 0
        heads = self.batch * layer.query_heads
        keys = 4 * (layer.kv_heads + layer.query_heads) * layer.key_dim * 2 * self._tokens
        scores = min(SCORES, heads * self.queries * 2 * self.length)
        return keys + _DIVERGENCE * max(scores, heads * 2 * self.length)

    def _comparison(self, layer: Layer) -> int:
        """The block's output beside the exact one, and float32 copies of some tokens of both, or of
        what the heads gave before the output projection."""
        hidden: int = self._text.hidden_size
        wider = max(hidden, layer.query_heads * layer.value_dim)
        compared = self.batch * min(self.length, COMPARED_TOKENS)
        return 2 * hidden * self._tokens * self.item + 4 * 4 * wider * compared


def largest_batch(text: Corpus, batch: int, device: str) -> tuple[int, int]:
    """The rows, and the tokens of each, of the largest of the batches of up to `batch` rows that
    must fit a device. A GPU without memory for a batch gets halves of it."""
    rows, length = max(text.batches(batch if device == "cpu" else 1), key=torch.numel).shape
    return rows, length


def check_memory(footprint: EvaluationFootprint, model: PreTrainedModel, device: str) -> None:
    """Raise `RotationZooError` if a machine cannot hold the model and one batch, whatever else it
    holds. `model` is on `meta`."""
    # How large quantized weights are once they are loaded is not known.
    known = quantization_of(model.config) is None
    weights = model.num_parameters() * footprint.item if known else 0
    needed, total = weights + footprint.peak, total_memory(device == "cpu", spread=False)
    if _CERTAIN * needed > total:
        shorter = "add: --device-map auto, or give fewer or shorter texts: --batch 1 --length 2048"
        raise RotationZooError(
            f"texts of {footprint.length} tokens need about {needed / 1e9:.1f} GB, "
            f"{weights / 1e9:.1f} of them for the weights, and there are {total / 1e9:.1f}",
            hint="add: --device-map auto" if _CERTAIN * weights > total else shorter,
        )
