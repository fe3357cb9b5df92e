"""The samples of a search as they are stored until their layer is searched."""

from dataclasses import dataclass, field, replace

import torch

from rotationzoo.calibration.search.query_samples import QuerySample
from rotationzoo.model.capture import Attention


@dataclass(frozen=True)
class StoredSample:
    """A `QuerySample` as it is stored: in the model's dtype, on the layer's device or in host
    memory."""

    attend: Attention
    """The model's own attention call, without its mask."""
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor
    """The mask `[1, 1, Q, 2T]` on the layer's device. Layers share it, where the model's own mask
    is the same."""
    text: int
    layer: int
    """The layer whose queries these are. It may read the cache of another."""

    def load(self, projection: torch.Tensor | None) -> QuerySample:
        """The sample in float32 on the layer's device, with the layer's output projection."""
        device = self.mask.device
        query, key, value = (
            part.to(device, non_blocking=True).float()
            for part in (self.query, self.key, self.value)
        )
        length = key.shape[2]
        # The mask of exact attention: a query sees a position if it sees either copy.
        exact_mask = torch.maximum(self.mask[..., :length], self.mask[..., length:])
        exact = replace(self.attend, mask=exact_mask).weights(query, key)
        attend = replace(self.attend, mask=self.mask)
        if projection is not None:
            projection = projection.to(device)
        return QuerySample(attend, query, key, value, exact, self.text, projection)


@dataclass
class LayerSamples:
    """All samples of one layer that owns a cache."""

    device: torch.device
    """The layer's device, on which its search runs."""
    queries: list[StoredSample] = field(default_factory=list)
    """By text, and for each text by the layers that read the cache."""
    rows: tuple[torch.Tensor, torch.Tensor] | None = None
    """Keys and values `[N, H, D]` to learn from, in the model's dtype."""


Samples = dict[int, LayerSamples]
"""Layer that owns a cache -> its samples."""
