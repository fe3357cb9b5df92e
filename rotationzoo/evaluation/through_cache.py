"""A model that reads its tokens through a real 2-bit cache, as a server would, in place of a
simulation."""

from types import SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedModel

from rotationzoo.cache.rotated import RotatedCache
from rotationzoo.codec.layout import CacheLayout
from rotationzoo.codec.rotated import RotatedCodec
from rotationzoo.codec.settings import CacheSettings
from rotationzoo.model.cache_names import cache_argument


class ThroughCache:
    """Called like the model itself, with token ids alone.

    What a query reads is what it reads in a `Simulation` of the same layout. With a
    `prefill_chunk`, ids are read chunk by chunk. Without one, they are read one by one as soon as
    anything is quantized, which takes as many calls as there are tokens; and so are the last
    `decoded` tokens.
    """

    def __init__(self, model: PreTrainedModel, codec: RotatedCodec, layout: CacheLayout):
        self.model, self.layout = model, layout
        self.settings = CacheSettings(codec, layout)
        self.device = model.device

    @torch.no_grad()
    def __call__(
        self, input_ids: torch.Tensor, logits_to_keep: int, decoded: int = 0, **ignored: Any
    ) -> SimpleNamespace:
        """The last `logits_to_keep` logits of ids `[B, T]`."""
        cache, logits = RotatedCache(self.settings, self.model), []
        left = input_ids.shape[1]
        for piece in input_ids.split([*self._pieces(left - decoded), *[1] * decoded], dim=1):
            length = piece.shape[1]
            if self.layout.prefill_chunk and length == 1 and not decoded:
                # A chunk of one token would count as a decoding step. The second one is not read.
                piece = piece.repeat(1, 2)
            left -= length
            wanted = piece.shape[1] if left < logits_to_keep else 1
            given = cache_argument(self.model, cache)
            output = self.model(input_ids=piece, use_cache=True, logits_to_keep=wanted, **given)
            if left < logits_to_keep:
                logits.append(output.logits[:, :length][:, -(logits_to_keep - left) :])
        return SimpleNamespace(logits=torch.cat(logits, dim=1))

    def _pieces(self, length: int) -> list[int]:
        """How many tokens each call reads."""
        size = self.layout.prefill_chunk
        if size is None:
            # Before this position, every query reads everything exact.
            exact = min(self.layout.first_quantized, length)
            return [part for part in (exact, *[1] * (length - exact)) if part]
        return [min(size, length - start) for start in range(0, length, size)]
