"""The 2-bit formats, one row of a table each.

This is the only list of their names. It imports no torch, which would slow the command line down.
docs/codec.md has the formulas side by side. A field of `Format` is read by `int2`, and
`cuda.Variant` hands it to `int2.cu`.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Format:
    """How the rows of one engine differ from another's."""

    interpolated: bool
    """Whether the clip threshold is interpolated between the magnitudes of two channels."""
    metadata: Literal["float32", "float16"]
    """The type of a stored scale or offset."""
    offset: Literal["zero", "minimum", "none"]
    """How a code becomes a value: `zero` is `(code - zero) * scale`, `minimum` is
    `code * scale + minimum`. `none`: rows have codes of transform coding, and no nearest ones."""
    packing: Literal["strided", "consecutive"]
    """Which four codes share a byte, lowest bits first. `strided`: byte i holds channels i,
    i + D/4, i + D/2 and i + 3D/4. `consecutive`: channels 4i to 4i + 3."""

    @property
    def metadata_bits(self) -> int:
        """Bits of one stored scale or one stored offset."""
        return {"float32": 32, "float16": 16}[self.metadata]


SGLANG = Format(interpolated=False, metadata="float32", offset="zero", packing="strided")
VLLM = Format(interpolated=True, metadata="float16", offset="minimum", packing="consecutive")
SEGMENTS = Format(interpolated=False, metadata="float32", offset="none", packing="consecutive")
"""Transform coding, whose channels have different widths: see `transform.SegmentLayout`. Only our
own cache and the plugin for vLLM have it."""
BUDGETED = "segments"
"""The name of the format with a budget of bits, where layers may differ."""

FORMATS = {"sglang": SGLANG, "vllm": VLLM}
"""The formats of engines."""
SIMULATED = FORMATS | {BUDGETED: SEGMENTS}
"""All formats, with which a model can be evaluated."""
