"""The engines' formats of few bits, one row of a table each.

This is the only list of their names. It imports no torch, for which the command line would wait.
docs/codec.md has the formulas side by side. A format with a way of its own gets a field in
`Format`, which `int2` and `int2.cu` then read; `cuda.Variant` hands it to the kernel.
"""

from dataclasses import dataclass, replace
from typing import Literal

from rotationzoo.errors import RotationZooError

Packing = Literal["strided", "consecutive"]
"""Which n codes share a word, lowest bits first. A byte holds four codes of 2 bits, two of 4 bits
or one of 8 bits. Three bytes hold eight codes of 3 bits, the lowest bits in the first byte. In
`strided`, word i holds channels i, i + D/n, i + 2D/n and so on; in `consecutive`, channels n i to
n i + n - 1."""
BITS = (2, 3, 4, 8)
"""Bits that a code may have. Engines have 2, and kernels all but 3."""


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
    """How a code becomes a value: `zero` is `(code - zero) * scale`, `minimum` is `code * scale +
    minimum`, and `none`, which stores no offset, is `(code - largest code / 2) * scale`."""
    packing: Packing
    """Which codes share a byte."""
    bits: int = 2
    """Bits of a code."""
    fine_channels: int = 0
    """How many of a row's last channels, a multiple of 8, have codes of one bit more and half the
    step: error feedback leaves its largest errors there. Their lowest bits follow the packed codes,
    eight a byte. Formats with an offset have none, and kernels take multiples of 16."""

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise RotationZooError(f"a code has 2, 3, 4 or 8 bits, and not {self.bits}")

    @property
    def largest_code(self) -> int:
        """The largest code: the smallest is 0."""
        return (1 << self.bits) - 1

    @property
    def metadata_bits(self) -> int:
        """Bits of one stored scale or one stored offset."""
        return {"float32": 32, "float16": 16}[self.metadata]

    @property
    def metadata_numbers(self) -> int:
        """How many numbers are stored of a group: its scale, and its offset if it has one."""
        return 1 if self.offset == "none" else 2

    def row_bytes(self, dim: int) -> int:
        """Bytes of the packed codes of `dim` channels."""
        return (dim * self.bits + self.fine_channels) // 8


SGLANG = Format(interpolated=False, metadata="float32", offset="zero", packing="strided")
VLLM = Format(interpolated=True, metadata="float16", offset="minimum", packing="consecutive")
FINE = Format(
    interpolated=False,
    metadata="float16",
    offset="none",
    packing="strided",
    fine_channels=48,
)
"""As many bytes as `SGLANG` where a row is one group: a float16 scale and 48 third bits take the
place of a float32 scale and a float32 offset. Our own cache has it, and the plugin for vLLM."""
SEGMENTS = Format(
    interpolated=False, metadata="float32", offset="none", packing="consecutive", bits=4
)
BUDGETED = "segments"
"""The name of the format whose rows may have other bits in every layer."""

FORMATS = {"sglang": SGLANG, "vllm": VLLM}
"""The formats of engines."""

SIMULATED = FORMATS | {
    "fine": FINE,
    "segments": SEGMENTS,
    "sglang-3": replace(SGLANG, bits=3),
    "sglang-4": replace(SGLANG, bits=4),
}
"""The formats that a model can be evaluated with."""
