"""The memory of a request's cache: of what was measured, and of what an engine stores."""

from dataclasses import dataclass, replace
from typing import Self

from rotationzoo.artifact.measured import Measured, MeasuredArm, plain_arm
from rotationzoo.artifact.store import Artifact
from rotationzoo.codec.formats import FINE, SGLANG, SIMULATED
from rotationzoo.codec.rotated import RotatedCodec
from rotationzoo.codec.size import CONTEXT, EXACT_BITS, codec_bits
from rotationzoo.codec.windows import CacheLayout
from rotationzoo.figures import byte_count
from rotationzoo.geometry import cached_layers
from rotationzoo.report.tables import Table

_CONTEXTS = 8192, 32768, 131072


@dataclass(frozen=True)
class Request:
    """A request of `context` tokens. `elements` are cached of each token, None if the shapes are
    not known; `share` of them were stored in few bits."""

    context: int = CONTEXT
    elements: int | None = None
    share: float = 1.0

    @classmethod
    def measured_on(cls, artifact: Artifact, measured: Measured | None, context: int) -> Self:
        """A request to the artifact's model, whose cache is stored as it was measured."""
        layers = cached_layers(artifact.geometry)
        total = sum(layer.elements for layer in layers)
        if measured is None or not measured.layers:
            return cls(context, total)
        stored = [layer.elements for layer in layers if layer.index in measured.layers]
        return cls(context, total, sum(stored) / total)

    def arm_bits(self, arm: MeasuredArm, measured: Measured) -> float:
        """Bits of an element of an arm's cache, from those of a request of `CONTEXT` tokens. Arms
        that quantize tokens in groups are off by the exact tokens of at most one group."""
        exact = measured.window.sink + measured.window.recent
        if exact >= CONTEXT:
            return EXACT_BITS
        stored = (arm.bits_per_element * CONTEXT - EXACT_BITS * exact) / (CONTEXT - exact)
        quantized = self.share * max(0, self.context - exact) / self.context
        return quantized * stored + (1 - quantized) * EXACT_BITS

    @property
    def scale(self) -> tuple[float, str]:
        """What a chart multiplies bits of an element with, and the unit that this gives."""
        if self.elements is None:
            return 1.0, f"bits of an element at {self.context:,} tokens"
        size = self.elements * self.context / 8
        factor, unit = (1e9, "GB") if size * EXACT_BITS >= 1e9 else (1e6, "MB")
        return size / factor, f"{unit} of cache at {self.context:,} tokens"

    def describe_saving(self, bits: float) -> str:
        """One sentence on what a cache of `bits` bits an element saves."""
        if not 0 < bits < EXACT_BITS:
            return f"At {self.context:,} tokens, the cache stays exact: nothing is saved."
        sizes = [f"{bits:.2f} bits an element", str(EXACT_BITS)]
        if self.elements is not None:
            each = self.elements * self.context / 8
            sizes = [byte_count(each * bits), byte_count(each * EXACT_BITS)]
        return (
            f"At {self.context:,} tokens in every layer, the cache takes {sizes[0]} in place of "
            f"{sizes[1]}: {EXACT_BITS / bits:.1f} times smaller."
        )


def layout_of(artifact: Artifact, measured: Measured | None) -> CacheLayout:
    """How an engine stores the cache: in the format and with the windows that were measured."""
    recipe = artifact.recipe
    if measured is None:
        return CacheLayout.of_recipe(recipe, FINE if recipe.budget else SGLANG)
    layout = CacheLayout.of_recipe(recipe, SIMULATED.get(measured.format, SGLANG))
    return replace(layout, sink=measured.window.sink, recent=measured.window.recent)


def stored_bits(artifact: Artifact, measured: Measured | None, tokens: int) -> float:
    """Bits an element of a cache of `tokens` tokens. All its layers are stored as they were
    measured, or as the artifact's own budget says."""
    if measured is not None:
        arm = plain_arm(measured.window.arms, artifact.identity)
        assert arm is not None, "such an evaluation is not read"
        return Request(tokens).arm_bits(arm, measured)
    codec = RotatedCodec(artifact.rotations, artifact.recipe.group_size)
    return codec_bits(artifact.geometry, codec, layout_of(artifact, None), tokens)


def memory_table(artifact: Artifact, measured: Measured | None, context: int) -> Table:
    """The size of a cache of some lengths: figures that follow from shapes alone."""
    elements = sum(layer.elements for layer in cached_layers(artifact.geometry))
    rows = []
    for tokens in sorted({*(each for each in _CONTEXTS if each < context), context}):
        bits = stored_bits(artifact, measured, tokens)
        size = elements * tokens / 8
        sizes = [byte_count(size * EXACT_BITS), byte_count(size * bits)]
        rows.append([f"{tokens:,}", *sizes, f"{EXACT_BITS / bits:.1f} times"])
    stored = f"{layout_of(artifact, measured).format.bits} bits"
    return Table("Memory of the cache", ["tokens", "bfloat16", stored, "smaller"], rows)
