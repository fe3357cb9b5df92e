"""What a search works on, taken to the frame of the folded weights, where equalized rows are
rotated."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from rotationzoo.calibration.equalizing import Equalizers
from rotationzoo.calibration.search.query_samples import QuerySample
from rotationzoo.calibration.search.stored import LayerSamples
from rotationzoo.linalg.moments import Moment

Projections = Mapping[int, torch.Tensor | None]
"""Layer -> its output projection by query head, `[H_q, D_v, hidden]` float32; None if it could not
be read."""


@dataclass(frozen=True)
class LayerData:
    """What is known of one layer: the inputs of its search beside the recipe and the baseline.

    Moments and projections are those of the folded weights, where there is an equalizer. Samples
    are stored as the model computed them, and folded when they are loaded.
    """

    moments: Mapping[str, Moment]
    stored: LayerSamples
    projections: Projections
    equalizers: Equalizers | None = None

    @classmethod
    def fold(
        cls,
        moments: Mapping[str, Moment],
        stored: LayerSamples,
        projections: Projections,
        equalizers: Equalizers | None,
    ) -> "LayerData":
        """The data as the folded weights compute it; unchanged without equalizers.

        Attention, and errors after the output projection, are those of the published weights.
        """
        if equalizers is None:
            return cls(moments, stored, projections)
        folded: dict[int, torch.Tensor | None] = {}
        for layer, projection in projections.items():
            folded[layer] = projection
            if projection is not None:
                folded[layer] = fold_projection(projection, equalizers)
        return cls(equalizers.fold(moments), stored, folded, equalizers)

    @property
    def device(self) -> torch.device:
        """The device of the layer, where its search runs."""
        return self.stored.device

    def load_samples(self) -> list[QuerySample]:
        """The query samples in float32, on the devices of the layers that they are of."""
        samples = []
        for stored in self.stored.queries:
            sample = stored.load(self.projections.get(stored.layer))
            if self.equalizers is not None:
                sample = fold_sample(sample, self.equalizers)
            samples.append(sample)
        return samples


def fold_sample(sample: QuerySample, equalizers: Equalizers) -> QuerySample:
    """A sample in the folded frame, but for its projection: its queries are divided by the factors
    of the keys that they read."""
    factors = equalizers.key.to(sample.key)
    by_query_head = factors.repeat_interleave(sample.group, 0)[:, None]
    return replace(
        sample,
        query=sample.query / by_query_head,
        key=sample.key * factors[:, None],
        value=sample.value @ equalizers.value.to(sample.value),
    )


def fold_projection(projection: torch.Tensor, equalizers: Equalizers) -> torch.Tensor:
    """A projection by query head `[H_q, D_v, hidden]` that undoes the matrices of the values."""
    inverse: torch.Tensor = torch.linalg.inv(equalizers.value.double())
    group = len(projection) // len(inverse)
    return inverse.repeat_interleave(group, 0).to(projection) @ projection
