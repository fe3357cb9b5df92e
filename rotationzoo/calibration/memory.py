"""Estimates the memory and disk that a calibration needs, from the shapes of the model and the
lengths of the text.

Each term counts tensors that exist at the same time. The tests compare the terms with what is
really allocated.
"""

from dataclasses import dataclass

from transformers import PretrainedConfig

from rotationzoo.linalg.run_sums import run_bytes
from rotationzoo.model.geometry import Geometry, cached_layers
from rotationzoo.model.long_masks import BLOCK_QUERIES, LARGEST_MASK
from rotationzoo.recipe import SELF, Recipe

# torch and transformers themselves, whose memory counts on a CPU: 420 to 460 MB measured.
_LIBRARIES = 450_000_000


@dataclass(frozen=True)
class Footprint:
    """Estimated sizes of one job, in bytes."""

    recipe: Recipe
    geometry: Geometry
    config: PretrainedConfig
    batch: int
    """Rows per forward pass."""
    item: int
    """Bytes per activation element."""
    on_cpu: bool

    @property
    def statistics(self) -> int:
        """The statistics: four float64 second moments per layer, one more with key energy, and one
        of the output projection with an equalizer."""
        if not self.recipe.needs_statistics:
            return 0
        two_passes = self.recipe.value_statistic == "key_energy"
        value_moments = 2 + int(two_passes) + int(self.recipe.equalize)
        return sum(
            8 * layer.kv_heads * (2 * layer.key_dim**2 + value_moments * layer.value_dim**2)
            for layer in cached_layers(self.geometry)
        )

    @property
    def rotations(self) -> int:
        """The rotations: two float32 matrices per KV head, or per layer if heads are pooled, and
        the equalizers and the factors of error feedback of every KV head."""
        total = 0
        for layer in cached_layers(self.geometry):
            heads = 1 if self.recipe.pooling == "layer" else layer.kv_heads
            total += 4 * heads * (layer.key_dim**2 + layer.value_dim**2)
            if self.recipe.equalize:
                total += 4 * layer.kv_heads * (layer.key_dim + layer.value_dim**2)
            if self.recipe.feedback:
                total += 4 * layer.kv_heads * (layer.key_dim**2 + layer.value_dim**2)
        return total

    def peak(self, weights: int) -> int:
        """Peak memory of the job, including `weights` bytes for the model."""
        libraries = _LIBRARIES if self.on_cpu else 0
        if not self.recipe.needs_statistics:
            return self.rotations + libraries
        passing = weights + self.pass_bytes(self.batch)
        # On a CPU, the allocator keeps what the passes freed.
        if self.on_cpu:
            return libraries + passing + self.rotations
        # After the passes, the sums exist beside the averages that are written.
        return max(passing, weights + 2 * self.statistics + self.rotations)

    def pass_bytes(self, batch: int) -> int:
        """What a pass over `batch` rows takes beside the weights, with the sums: those of whole
        batches, of the batch under way, and of this batch before its last rows."""
        working = max(self.activations(batch), self.generation_cache(batch))
        return working + 3 * self.statistics

    def activations(self, batch: int) -> int:
        """Peak memory of the decoder for one batch.

        The terms are the residual stream, one layer's projections, what adding its queries or its
        outputs to the sums takes and, under eager attention, the scores.
        """
        length, tokens = self.recipe.data.length, self.recipe.data.length * batch
        scores = 0
        if self._text._attn_implementation == "eager":
            heads = max((layer.query_heads for layer in self.geometry), default=0)
            whole = length * length <= LARGEST_MASK
            scores = 3 * 4 * tokens * (length if whole else BLOCK_QUERIES) * heads
        return self._states(tokens) + self._adding(batch) + scores

    def _adding(self, batch: int) -> int:
        """The most memory that adding one layer's rows to the sums takes: float64 copies of one
        row of text on a CPU, and runs of a whole batch on a GPU."""
        length = self.recipe.data.length
        if self.on_cpu:
            return 2 * 8 * length * self._widest
        adding = [0]
        for layer in self.geometry:
            rows = length * batch
            for dim in (layer.key_dim, layer.value_dim):
                adding.append(run_bytes(layer.kv_heads, layer.group * rows, dim, self.item))
            if self.recipe.value_statistic == "key_energy":
                adding.append(
                    run_bytes(layer.kv_heads, rows, layer.value_dim, self.item, weighted=True)
                )
        return max(adding)

    def _states(self, tokens: int) -> int:
        """The residual stream and one layer's projections."""
        hidden: int = self._text.hidden_size
        inner = getattr(self._text, "intermediate_size", None) or 4 * hidden
        if not isinstance(inner, int):  # some models have one size per layer
            inner = max(inner)
        residual: int = 4 * tokens * hidden * self.item
        projections: int = 3 * tokens * self.item * max(self._widest, inner)
        return residual + projections

    @property
    def _widest(self) -> int:
        """The largest width of a layer's queries and outputs together."""
        widths = (layer.query_heads * (layer.key_dim + layer.value_dim) for layer in self.geometry)
        return max(widths, default=0)

    def generation_cache(self, batch: int) -> int:
        """The KV cache of one batch of text that the model writes."""
        if self.recipe.data.source != SELF:
            return 0
        width = sum(
            layer.kv_heads * (layer.key_dim + layer.value_dim)
            for layer in cached_layers(self.geometry)
        )
        return batch * self.recipe.data.length * width * self.item

    @property
    def _text(self) -> PretrainedConfig:
        return self.config.get_text_config(decoder=True)
