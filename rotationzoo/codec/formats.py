"""The engines' 2-bit formats, one row of a table each.

This is the only list of their names. It imports nothing but the standard library, so that the
command line can offer the names without waiting for torch. docs/codec.md has the formulas side by
side. A format that rounds, packs or stores in a way of its own gets a field in `Format`, which
`int2` and `int2.cu` then read; `cuda.Variant` hands it to the kernel.
"""

from dataclasses import dataclass, replace
from typing import Literal

Packing = Literal["strided", "consecutive"]
"""Which codes share a byte, lowest bits first. In `strided`, byte i holds channels i, i + D/4, i +
D/2 and i + 3D/4; in `consecutive`, it holds channels 4i to 4i + 3."""


@dataclass(frozen=True)
class Format:
    """How one engine's 2-bit rows differ from another's."""

    clip_scope: Literal["row", "group"]
    """Whether the clip threshold is taken over all D channels of a row, or within each quantization
    group."""
    interpolated: bool
    """Whether the threshold is interpolated between the magnitudes of two channels, or is one of
    them."""
    metadata: Literal["float32", "float16"]
    """The type in which a group's scale and offset are stored."""
    offset: Literal["zero", "minimum"]
    """How a code becomes a value: `zero` is `(code - zero) * scale`, `minimum` is `code * scale +
    minimum`."""
    packing: Packing
    """Which codes share a byte."""
    rounded_with: Literal["stored", "computed"] = "stored"
    """Whether codes are rounded with the scale and offset as they are stored, or with their float32
    values before storage."""
    bisected: bool = False
    """Whether the threshold is found by bisection, as in SGLang's kernels. See
    `clip.bisected_threshold`."""

    @property
    def metadata_bits(self) -> int:
        """Bits of one stored scale or one stored offset."""
        return {"float32": 32, "float16": 16}[self.metadata]


SGLANG = Format("row", interpolated=False, metadata="float32", offset="zero", packing="strided")
VLLM = Format("row", interpolated=True, metadata="float16", offset="minimum", packing="consecutive")
MLX = Format(
    "group",
    interpolated=False,
    metadata="float16",
    offset="zero",
    packing="consecutive",
    rounded_with="computed",
)

FORMATS = {"sglang": SGLANG, "vllm": VLLM, "mlx": MLX}
"""The formats that the CUDA kernels write."""

SIMULATED = FORMATS | {"sglang-bisected": replace(SGLANG, bisected=True)}
"""The formats that a model can be evaluated with. SGLang sorts a row during prefill, but bisects
when it stores tokens that leave the exact window. The longer a server decodes, the more its answers
depend on bisection."""
