"""How a cache stores its tokens: what is the same for all layers, and what one layer needs."""

from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from rotationzoo.cache.arm import Arm
from rotationzoo.cache.windows import Cache
from rotationzoo.codec import int2
from rotationzoo.codec.pages import PageLayout
from rotationzoo.errors import RotationZooError

Reading = Literal["auto", "rows", "pages"]
"""Restored `rows`, or the `pages` themselves. `auto` reads pages where there is a kernel for it."""
_HINT = "give the rotations of this model"


@dataclass(frozen=True)
class Storage:
    """How the layers of a cache store their tokens."""

    arm: Arm
    windows: Cache = field(default_factory=Cache)
    """The sizes of the exact windows, the 2-bit format, and what a chunk reads of earlier ones."""
    slack: int = 64
    """How many tokens more stay exact while candidates may be taken back (assisted decoding)."""
    block: int = 256
    """Tokens per block, at least."""

    reading: Reading = "auto"
    """What a decoding step of a layer with full attention reads."""

    _inverses: dict[tuple[int, str], torch.Tensor] = field(
        init=False, default_factory=dict, repr=False, compare=False
    )

    @property
    def block_tokens(self) -> int:
        """Tokens per block: a multiple of the tokens that are quantized together."""
        group = self.arm.token_group
        return -(-self.block // group) * group

    def quantize(self, rows: torch.Tensor, layer: int, side: str) -> int2.Quantized:
        """The packed codes `[B, H, T, D / 4]` of rows `[B, H, T, D]` of the model, with their
        scales and offsets. On a GPU with a kernel, nothing waits for the result, and rows that
        cannot be quantized are reported by `check`."""
        rotated = self.arm.rotate(rows, layer, side)
        if encoder := self.arm.encoder(layer, side, self.windows.format, rows.device):
            return encoder(rotated)
        quantized = self.arm.quantize(rotated, layer, side, self.windows.format)
        packing = self.page_layout(layer, side).format.packing
        return replace(quantized, codes=int2.pack(quantized.codes, packing))

    def check(self, layer: int, side: str, device: torch.device) -> None:
        """Raise `RotationZooError` where a row since the last call could not be quantized."""
        if encoder := self.arm.encoder(layer, side, self.windows.format, device):
            encoder.check()

    def page_layout(self, layer: int, side: str) -> PageLayout:
        """How a page holds the codes of a side."""
        return self.arm.page_layout(layer, side, self.block_tokens, self.windows.format)

    def inverse(self, layer: int, side: str) -> torch.Tensor:
        """The matrices `[H, D, D]` that take dequantized rows to the model's frame: float32, and
        contiguous as a kernel reads them. All streams of a layer share them."""
        if (layer, side) not in self._inverses:
            rotation = self.arm.rotations[layer][side]
            inverse = rotation.inverse.expand(len(rotation.clip), -1, -1)
            self._inverses[layer, side] = inverse.contiguous()
        return self._inverses[layer, side]

    def for_layer(self, index: int, key: torch.Tensor, value: torch.Tensor) -> "Storage":
        """The same with the rotations of one layer alone, on the device of its keys and values
        `[B, H, T, D]`. Raises `RotationZooError` where they are for other heads or dimensions."""
        if index not in self.arm.rotations:
            raise RotationZooError(f"there is no rotation for layer {index}", hint=_HINT)
        for side, rows in (("key", key), ("value", value)):
            rotation = self.arm.rotations[index][side]
            heads, dim = rows.shape[1], rows.shape[3]
            if (len(rotation.clip), rotation.dim) != (heads, dim):
                raise RotationZooError(
                    f"layer {index} has {heads} KV heads of {dim} channels, and its rotations are "
                    f"for {len(rotation.clip)} of {rotation.dim}",
                    hint=_HINT,
                )
        return replace(self, arm=self.arm.for_layer(index, key.device))

    def __deepcopy__(self, memo: object) -> "Storage":
        return self  # copies of a cache share its rotations
