"""transformers' own quantized caches (HQQ and quanto), read as `generate` would read them.

They need packages that rotationzoo does not depend on:

    pip install hqq optimum-quanto
"""

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import (
    HQQQuantizedLayer,
    QuantizedLayer,
    QuantoQuantizedLayer,
)

from rotationzoo.model.cache_names import cache_argument

GROUP = 64  # elements that share a scale: transformers' default
_METADATA = 16  # bits of a scale and of a zero, in a 16-bit model


class _RowByRow(QuantizedLayer):
    """Quantizes every row of a batch alone, as with a batch of one. The libraries cut the whole
    tensor into groups, so that a group would hold elements of several requests."""

    def _quantize(self, tensor: torch.Tensor, axis: int) -> list[Any]:
        quantize = super()._quantize
        return [quantize(row.contiguous(), axis) for row in tensor.split(1)]

    def _dequantize(self, quantized: list[Any]) -> torch.Tensor:
        dequantize = super()._dequantize
        return torch.cat([dequantize(row) for row in quantized])


class _HQQLayer(_RowByRow, HQQQuantizedLayer):
    def _quantize(self, tensor: torch.Tensor, axis: int) -> list[Any]:
        # HQQ gives its memory back to the GPU after each tensor, which takes longer than the rest.
        with patch("torch.cuda.empty_cache"):
            return super()._quantize(tensor, axis)


class _QuantoLayer(_RowByRow, QuantoQuantizedLayer):
    def __init__(self, **settings: Any):
        super().__init__(**settings)
        unpack_in_torch()


def unpack_in_torch() -> None:
    """Make quanto unpack its codes with torch alone. Otherwise the first call compiles its
    extension, which takes minutes."""
    from optimum.quanto.library.extensions import extension

    for name in ("quanto_cpp", "quanto_cuda"):
        if name in extension._extensions:
            extension._extensions[name]._lib = SimpleNamespace(unpack=_unpack)


def _unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The codes of bytes `[N, ...]` as quanto packs them: the lowest bits of all bytes first, then
    the next ones, `[N * 8 / bits, ...]`."""
    shifts = range(0, 8, bits)
    return torch.cat([packed >> shift & (1 << bits) - 1 for shift in shifts])


@dataclass(frozen=True)
class TransformersCache:
    """A quantized cache of transformers.

    HQQ's axis 0, the default, groups elements at a distance of `numel / 64`: where the number of
    tokens times KV heads is a multiple of 64, these are 64 elements of one channel, from tokens
    (and heads) all over the context. Axis 1 groups 64 neighbouring channels of one token. quanto
    does the same under the names -1 (a channel's 64 successive tokens) and 0.
    """

    backend: str
    """`hqq` or `quanto`."""
    bits: int
    axis: int
    """Of both keys and values."""
    residual: int = 320
    """The most tokens that stay exact. When there are as many, all are quantized, and those that
    were quantized before are quantized again."""

    @property
    def stored_bits(self) -> float:
        """Bits per quantized element, with its share of the scale and the zero."""
        return self.bits + 2 * _METADATA / GROUP

    def bits_per_element(self, length: int) -> float:
        """Bits per element of a cache of `length` tokens whose residual is full, the most that it
        takes. On average over a long answer, the residual is half full."""
        exact = min(self.residual, length)
        return ((length - exact) * self.stored_bits + exact * 16) / length

    def prefix(self, length: int, kept: int) -> int:
        """How many tokens are prefilled, so that the last `kept` logits of `length` tokens come
        from a quantized cache.

        The rest fits into the residual if it can: no cache of this kind keeps more of the end
        exact. It is a multiple of 64, which gives HQQ groups of single channels.
        """
        most = (length - kept) // GROUP * GROUP
        return min(most, math.ceil((length - self.residual) / GROUP) * GROUP)

    def create(self, model: PreTrainedModel) -> Cache:
        """An empty cache for a model with full attention in every layer."""
        kind = {"hqq": _HQQLayer, "quanto": _QuantoLayer}[self.backend]
        layers = range(model.config.get_text_config(decoder=True).num_hidden_layers)
        settings = {"axis_key": self.axis, "axis_value": self.axis}
        settings |= {"q_group_size": GROUP, "residual_length": self.residual}
        return Cache(layers=[kind(nbits=self.bits, **settings) for _ in layers])


class ThroughCache:
    """A model that reads its tokens through a quantized cache; it is called like the model itself.

    The beginning is prefilled in one call, and reads itself exact. What follows is read in pieces
    that end where the cache quantizes, which gives what reading token by token gives.
    """

    def __init__(self, model: PreTrainedModel, cache: TransformersCache):
        self.model, self.cache = model, cache
        self.device = model.device

    def __call__(self, input_ids: torch.Tensor, logits_to_keep: int, **_: Any) -> SimpleNamespace:
        """The last `logits_to_keep` logits of token ids `[B, T]`."""
        length = input_ids.shape[1]
        start = self.cache.prefix(length, logits_to_keep)
        if start <= 0:
            raise SystemExit(f"{length} tokens are too few for {logits_to_keep} logits")
        given = cache_argument(self.model, self.cache.create(self.model))
        self.model(input_ids=input_ids[:, :start], logits_to_keep=1, **given)
        logits = []
        for piece in self._pieces(input_ids[:, start:]):
            logits.append(self.model(input_ids=piece, **given).logits)
        return SimpleNamespace(logits=torch.cat(logits, dim=1)[:, -logits_to_keep:])

    def _pieces(self, ids: torch.Tensor) -> list[torch.Tensor]:
        """Pieces of `residual - 1` tokens, each followed by the one token that makes the cache
        quantize them."""
        sizes: list[int] = []
        while (left := ids.shape[1] - sum(sizes)) > 0:
            full = bool(sizes) and sizes[-1] == self.cache.residual - 1
            sizes.append(1 if full else min(left, self.cache.residual - 1))
        return list(ids.split(sizes, dim=1))


CACHES = {
    "hqq-4": TransformersCache("hqq", 4, axis=0),
    "hqq-2": TransformersCache("hqq", 2, axis=0),
    "hqq-2-per-token": TransformersCache("hqq", 2, axis=1),
    "quanto-4": TransformersCache("quanto", 4, axis=0),
    "quanto-2": TransformersCache("quanto", 2, axis=0),
    "quanto-2-per-channel": TransformersCache("quanto", 2, axis=-1),
}
"""The caches that are compared. Without a suffix, the axis is transformers' default."""
