"""Which rows of a projection that computes more than values are the values of a layer."""

import torch

from rotationzoo.model.scale_trace import ScaleTrace


class FusedValues:
    """The rows of values in projections that are fused with those of queries and keys."""

    def __init__(self, run: ScaleTrace) -> None:
        self._run = run
        labels = run.layers.values()
        # Every label of a layer's values must be met once here, and nowhere else.
        self._values = torch.cat([each.value[:, 0].flatten() for each in labels])
        others = [rows for each in labels for rows in (each.query, each.key)]
        constraints = run.constraints
        used = [*others, *constraints.bent, *(pinned for _, pinned in constraints.pins)]
        self._used = torch.cat([rows.flatten() for rows in used]).unique()

    def first_row(self, layer: int, module: str) -> int | None:
        """The first row of a layer's values in a module. The others follow it, head by head.

        None if a layer's values are not such rows, or if anything but its attention reads them: a
        matrix that mixes the channels of each head could then not be folded into the rows.
        """
        labels = self._run.layers[layer].value
        first = labels[:, 0].flatten()
        in_order = torch.arange(len(first)) + first[0]
        same = torch.equal(labels, labels[:, :1].expand_as(labels)) and torch.equal(first, in_order)
        reads = int(torch.isin(self._values, first).sum())
        if not same or reads != len(first) or torch.isin(first, self._used).any():
            return None
        weights = [weight for weight in self._run.weights if weight.module == module]
        for weight in weights:
            if weight.first <= first[0] and first[-1] < weight.first + weight.count:
                return int(first[0]) - weight.first
        return None
