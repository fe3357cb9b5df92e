"""An arm that stores keys and values as another engine's quantized cache does."""

from dataclasses import dataclass

import torch

from rotationzoo.codec import int2
from rotationzoo.codec.engine_caches import EngineCache


@dataclass(frozen=True)
class EngineArm:
    """A cache of `codec.engine_caches` under a name.

    These engines keep no token exact, not even the one that they decode: simulate them with
    `Cache(sink=0, recent=0)`. Other windows show what exact tokens would give. The 2-bit format of
    the other arms does not matter.
    """

    name: str
    cache: EngineCache

    @property
    def token_group(self) -> int:
        """Tokens that are quantized together: each token has scales of its own."""
        return 1

    def keep_exact(self, rows: torch.Tensor, layer: int, side: str) -> torch.Tensor:
        """Keys or values as they are."""
        return rows

    def fake_quantize(
        self, rows: torch.Tensor, layer: int, side: str, format: int2.Format
    ) -> torch.Tensor:
        """Keys or values `[B, H, T, D]` as the engine reads them back, in their type."""
        return self.cache.side(side).read(rows.float()).to(rows.dtype)

    def row_range(self, rows: torch.Tensor, layer: int, side: str) -> None:
        """Engines do not say in which coordinates they round."""

    def stored_bits(self, side: str, dim: int, format: int2.Format) -> float:
        """Bits per element, with its share of the scales."""
        return self.cache.side(side).bits_per_element(dim)
