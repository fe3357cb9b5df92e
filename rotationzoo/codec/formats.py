"""The engines' formats of few bits, one row of a table each.

This is the only list of their names. It imports no torch, for which the command line would wait.
docs/codec.md has the formulas side by side. A format with a way of its own gets a field in
`Format`, which `int2` and `int2.cu` then read; `cuda.Variant` hands it to the kernel.
"""

from dataclasses import dataclass, replace
from typing import Literal

from rotationzoo.errors import RotationZooError

Packing = Literal["strided", "consecutive"]
"""Which n codes share a word, lowest bits first. A byte holds four codes of 2 bits or two of 4
bits. Three bytes hold eight codes of 3 bits, the lowest bits in the first byte. In `strided`, word
i holds channels i, i + D/n, i + 2D/n and so on; in `consecutive`, channels n i to n i + n - 1."""
BITS = (2, 3, 4)
"""Bits that a code may have. Engines and kernels have 2."""


@dataclass(frozen=True)
class Format:
    """How one engine's rows differ from another's. Raises `RotationZooError` for bits that are not
    in `BITS`."""

    interpolated: bool
    """Whether the threshold of a row's clip is interpolated between the magnitudes of two channels,
    or is one of them."""
    metadata: Literal["float32", "float16"]
    """The type in which a group's scale and offset are stored."""
    offset: Literal["zero", "minimum", "none"]
    """How a code becomes a value: `zero` is `(code - zero) * scale`, and `minimum` is `code * scale
    + minimum`. `none`: rows have no nearest codes, but those of transform coding."""
    packing: Packing
    """Which codes share a byte."""
    bits: int = 2
    """Bits of a code."""

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise RotationZooError(f"a code has 2, 3 or 4 bits, and not {self.bits}")

    @property
    def largest_code(self) -> int:
        """The largest code: the smallest is 0."""
        return (1 << self.bits) - 1

    @property
    def metadata_bits(self) -> int:
        """Bits of one stored scale or one stored offset."""
        return {"float32": 32, "float16": 16}[self.metadata]

    def row_bytes(self, dim: int) -> int:
        """Bytes of the packed codes of `dim` channels."""
        return dim * self.bits // 8


SGLANG = Format(interpolated=False, metadata="float32", offset="zero", packing="strided")
VLLM = Format(interpolated=True, metadata="float16", offset="minimum", packing="consecutive")
SEGMENTS = Format(interpolated=False, metadata="float32", offset="none", packing="consecutive")
"""The rows of transform coding, whose channels have bits of their own:
`transform.SegmentLayout` says how they are stored. Our own cache has it, and the plugin for
vLLM."""
BUDGETED = "segments"
"""The name of the format whose rows may have other bits in every layer."""

FORMATS = {"sglang": SGLANG, "vllm": VLLM}
"""The formats of engines."""

SIMULATED = FORMATS | {
    "segments": SEGMENTS,
    "sglang-3": replace(SGLANG, bits=3),
    "sglang-4": replace(SGLANG, bits=4),
}
"""The formats that a model can be evaluated with."""
