"""The frame in which the rotations of a layer are searched: that of the published weights, or the
folded one of its equalizers."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from rotationzoo.calibration.search.query_samples import QuerySample
from rotationzoo.linalg.equalization import fold_moments, frame_transforms
from rotationzoo.linalg.moments import Moment
from rotationzoo.rotations import LayerRotations


@dataclass(frozen=True)
class Frame:
    """The frame of one layer. Attention and the block's output are the same in all frames; what is
    quantized is not."""

    key: torch.Tensor | None = None
    """Factors `[H, D_k]` of keys; None in the frame of the published weights."""
    value: torch.Tensor | None = None
    """Matrices `[H, D_v, D_v]` of values."""

    @classmethod
    def of(cls, rotations: LayerRotations) -> "Frame":
        """The frame in which rotations quantize."""
        return cls(rotations.key.equalizer, rotations.value.equalizer)

    def fold_moments(self, moments: Mapping[str, Moment]) -> Mapping[str, Moment]:
        """The moments of the layer, by kind."""
        if self.key is None or self.value is None:
            return moments
        return fold_moments(moments, self.key, self.value)

    def fold_rows(
        self, rows: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Keys and values `[H, N, D]`."""
        if rows is None or self.key is None:
            return rows
        keys, values = rows
        return self._apply("key", keys), self._apply("value", values)

    def fold_samples(self, samples: list[QuerySample]) -> list[QuerySample]:
        """Samples with queries, keys, values and output projection in this frame."""
        if self.key is None:
            return samples
        return [self._fold_sample(sample) for sample in samples]

    def _fold_sample(self, sample: QuerySample) -> QuerySample:
        by_head = torch.unflatten(sample.query, 1, (-1, sample.group)).flatten(2, 3)
        query = self._apply("query", by_head)
        queries = torch.unflatten(query, 2, (sample.group, -1)).flatten(1, 2)
        projection = sample.projection
        if projection is not None:
            # `[H_q, D_v, hidden]`, whose columns are the rows that the transform is for.
            columns = torch.unflatten(projection, 0, (-1, sample.group)).transpose(2, 3)
            folded = self._apply("projection", columns.flatten(1, 2))
            columns = torch.unflatten(folded, 1, (sample.group, -1))
            projection = columns.transpose(2, 3).flatten(0, 1)
        key, value = self._apply("key", sample.key), self._apply("value", sample.value)
        return replace(sample, query=queries, key=key, value=value, projection=projection)

    def _apply(self, kind: str, rows: torch.Tensor) -> torch.Tensor:
        """Rows `[..., H, N, D]` of a kind in this frame."""
        assert self.key is not None
        assert self.value is not None
        return rows @ frame_transforms(self.key, self.value)[kind].to(rows)
