"""Scores of candidate rotations of one layer, on calibration text that the statistics have not
seen.

Keys are scored by the KL divergence of their attention and by how much they change the block's
output; values by the latter alone. Scores are relative to the recipe's own rotation, which scores
1. They cost one layer's attention, not a run of the model: whether the model takes what they choose
is decided by its answers (`contest`).
"""

from collections.abc import Sequence

import torch

from rotationzoo.calibration.search.layer_codec import LayerCodec
from rotationzoo.calibration.search.query_samples import QuerySample

BATCH = 8  # rotations scored at once


class Scorer:
    """Measures what rotations of one side of a layer change.

    - `samples`: the layer's query samples. A layer whose cache several layers read has samples on
      the devices of all of them.
    - `keys`: for values, the rotations `[H, D, D]` that were chosen for the keys.
    """

    @torch.no_grad()
    def __init__(
        self,
        side: str,
        samples: Sequence[QuerySample],
        codec: LayerCodec,
        keys: torch.Tensor | None = None,
    ):
        self.side, self.samples, self.codec = side, samples, codec
        self._quantized_parts: list[torch.Tensor] = []
        if side == "value":
            assert keys is not None
            for sample in samples:
                restored = codec.restore("key", sample.key, keys[None])
                self._quantized_parts.append(sample.attention(restored)[1])

    def find_norms(self, baseline: torch.Tensor) -> torch.Tensor:
        """What the recipe's own rotations `[H, D, D]` change, by measure: `[M, H]`."""
        return self._measure_all(baseline[None]).mean(0)[:, 0]

    def score(self, matrix: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
        """Scores of rotations `[S, H, D, D]` on the held-out texts, `[texts, S, H]`; lower is
        better.

        Layers that share a cache read the same texts, so their scores are averaged per text: they
        are not independent evidence.
        """
        scores = (self._measure_all(matrix) / norms[:, None]).mean(1)
        by_text: dict[int, list[torch.Tensor]] = {}
        for sample, of_sample in zip(self.samples, scores, strict=True):
            by_text.setdefault(sample.text, []).append(of_sample)
        return torch.stack([torch.stack(readers).mean(0) for readers in by_text.values()])

    @torch.no_grad()
    def _measure_all(self, matrix: torch.Tensor) -> torch.Tensor:
        """The measures `[samples, M, S, H]` of rotations `[S, H, D, D]`, on their device."""
        by_sample = []
        for number in range(len(self.samples)):
            batches = [self._measure(number, batch) for batch in torch.split(matrix, BATCH)]
            by_sample.append(torch.cat(batches, dim=1).to(matrix.device))
        return torch.stack(by_sample)

    def _measure(self, number: int, matrix: torch.Tensor) -> torch.Tensor:
        """The measures `[M, S, H]` on one sample."""
        sample = self.samples[number]
        if self.side == "value":
            restored = self.codec.restore("value", sample.value, matrix)
            return sample.value_error(self._quantized_parts[number], restored)[None]
        attention = sample.weights(self.codec.restore("key", sample.key, matrix))
        return torch.stack([sample.divergence(attention), sample.key_error(attention)])
