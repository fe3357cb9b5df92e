"""The engines' formats of few bits, one row of a table each.

This is the only list of their names. It imports no torch, for which the command line would wait.
docs/codec.md has the formulas side by side. A format with a way of its own gets a field in
`Format`, which `int2` and `int2.cu` then read; `cuda.Variant` hands it to the kernel.
"""

from dataclasses import dataclass
from typing import Literal

Packing = Literal["strided", "consecutive"]
"""Which four codes share a byte, lowest bits first. In `strided`, byte i holds channels i, i + D/4,
i + D/2 and i + 3D/4; in `consecutive`, channels 4i to 4i + 3."""
CODE_BITS = 2
LARGEST_CODE = 3


@dataclass(frozen=True)
class Format:
    """How one engine's rows differ from another's."""

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

    @property
    def metadata_bits(self) -> int:
        """Bits of one stored scale or one stored offset."""
        return {"float32": 32, "float16": 16}[self.metadata]


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

SIMULATED = FORMATS | {BUDGETED: SEGMENTS}
"""The formats that a model can be evaluated with."""
