"""What a search works on, taken to the frame of the folded weights, where equalized rows are
rotated."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from rotationzoo.calibration.equalizing import Equalizers
from rotationzoo.calibration.search.query_samples import QuerySample
from rotationzoo.linalg.moments import Moment


@dataclass(frozen=True)
class LayerData:
    """What is known of one layer: the inputs of its search beside the recipe and the baseline."""

    moments: Mapping[str, Moment]
    samples: list[QuerySample]
    rows: tuple[torch.Tensor, torch.Tensor] | None = None
    """Keys and values `[H, N, D]` to learn from."""

    def fold(self, equalizers: Equalizers | None) -> "LayerData":
        """The same data as the folded weights compute it; unchanged without equalizers.

        Attention, and errors after the output projection, are those of the published weights.
        """
        if equalizers is None:
            return self
        samples = [fold_sample(sample, equalizers) for sample in self.samples]
        rows = None if self.rows is None else fold_rows(*self.rows, equalizers)
        return LayerData(equalizers.fold(self.moments), samples, rows)


def fold_rows(
    key: torch.Tensor, value: torch.Tensor, equalizers: Equalizers
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values `[..., H, N, D]` in the folded frame."""
    factors, matrix = equalizers.key.to(key), equalizers.value.to(value)
    return key * factors[:, None], value @ matrix


def fold_sample(sample: QuerySample, equalizers: Equalizers) -> QuerySample:
    """A sample in the folded frame: its queries are divided by the factors of the keys that they
    read, and its projection undoes the matrices of the values."""
    key, value = fold_rows(sample.key, sample.value, equalizers)
    factors = equalizers.key.repeat_interleave(sample.group, 0)[:, None]
    projection = sample.projection
    if projection is not None:
        inverse: torch.Tensor = torch.linalg.inv(equalizers.value.double())
        undone = inverse.repeat_interleave(sample.group, 0).to(projection)
        projection = undone @ projection
    query = sample.query / factors.to(sample.query)
    return replace(sample, query=query, key=key, value=value, projection=projection)
