"""The settings of a cache that stores codes, the same for all its layers."""

from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from rotationzoo.codec.layout import CacheLayout
from rotationzoo.codec.pages import PageLayout
from rotationzoo.codec.rotated import RotatedCodec
from rotationzoo.errors import RotationZooError

Reading = Literal["auto", "rows", "pages"]
"""Restored `rows`, or the `pages` themselves. `auto` reads pages where there is a kernel for it."""


@dataclass(frozen=True)
class CacheSettings:
    """How the layers of a cache store their tokens. Raises `RotationZooError` for a format with
    codes of more than 2 bits, which only a simulation reads."""

    codec: RotatedCodec
    layout: CacheLayout = field(default_factory=CacheLayout)
    """The sizes of the exact windows, the format, and what a chunk reads of earlier ones."""
    slack: int = 64
    """How many tokens more stay exact while candidates may be taken back (assisted decoding)."""
    block: int = 256
    """Tokens per block."""
    reading: Reading = "auto"
    """The form in which a decoding step of a layer with full attention reads."""

    def __post_init__(self) -> None:
        if self.layout.format.bits != 2:
            raise RotationZooError(
                f"this cache stores codes of 2 bits, and the format has {self.layout.format.bits}",
                hint="evaluate it in a simulation: rotationzoo evaluate",
            )

    def page_layout(self, layer: int, side: str) -> PageLayout:
        """How a page holds the codes of a side."""
        return self.codec.page_layout(layer, side, self.block, self.layout.format)

    def for_layer(self, index: int, key: torch.Tensor, value: torch.Tensor) -> "CacheSettings":
        """The same with the rotations of one layer alone, on the device of its keys and values
        `[B, H, T, D]`. Raises `RotationZooError` where they are for other heads or dimensions."""
        return replace(self, codec=self.codec.for_layer(index, key, value))

    def __deepcopy__(self, memo: object) -> "CacheSettings":
        return self  # copies of a cache share its rotations
