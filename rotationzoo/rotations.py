"""The rotations of a model: matrices, clip ratios, means and transform coding for the keys and
values of every cached layer."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from rotationzoo.linalg.orthogonality import invert, orthogonality_error
from rotationzoo.linalg.transform_coding import SEGMENT, STEPS
from rotationzoo.sides import HEADS, CachedRows, rows_of
from rotationzoo.words import counted

SIDES = HEADS.sides


@dataclass(frozen=True)
class Rotation:
    """The rotation of one side of one layer. Rows `x` become `(x - mean) @ matrix`, are clipped,
    and get the nearest codes. With transform coding, `(x - mean) @ transform` are the channels."""

    matrix: torch.Tensor
    """`[H, D, D]` float32, with H = 1 if all KV heads share it. In tests it is float64, and rows
    are rotated in float64, so that results do not depend on the order of sums."""
    clip: torch.Tensor
    """Clip ratios `[KV heads]`, float64. A ratio of 1 turns clipping off."""
    eigenvalues: torch.Tensor | None = None
    """Eigenvalues `[H, D]` of the fitted statistic, ascending. None if imported files lack them."""
    mean: torch.Tensor | None = None
    """Mean row `[KV heads, D]`, subtracted before the rotation. None if not centered."""
    transform: torch.Tensor | None = None
    """The matrix `[KV heads, D, D]`, float32, that turns centered rows into the channels of
    transform coding, the strongest first (`linalg.transform_coding`). It is not orthogonal. This
    and the next three are None without transform coding."""
    deviations: torch.Tensor | None = None
    """Standard deviations of these channels, float32 `[KV heads, D]`."""
    costs: torch.Tensor | None = None
    """The cost of each channel without bits, in nats per token, float64 `[KV heads, D]`."""
    widths: torch.Tensor | None = None
    """The bits of each segment of channels, int64 `[KV heads, D / SEGMENT]`."""

    @property
    def steps(self) -> torch.Tensor:
        """The steps of the channels, `[KV heads, D]`; 0 for channels without bits."""
        assert self.widths is not None
        assert self.deviations is not None
        steps = torch.tensor(STEPS)[self.widths.cpu()].repeat_interleave(SEGMENT, dim=-1)
        return steps.to(self.deviations) * self.deviations

    @property
    def to_steps(self) -> torch.Tensor:
        """The matrices `[KV heads, D, D]` that turn centered rows into channels in steps."""
        assert self.transform is not None
        steps = self.steps[:, None]
        in_steps = self.transform / steps.where(steps > 0, torch.inf)
        return in_steps.to(self.matrix)

    @property
    def from_steps(self) -> torch.Tensor:
        """The matrices `[KV heads, D, D]` that undo `to_steps`. Raises as `invert`."""
        assert self.transform is not None
        inverse = invert(self.transform)
        return (inverse * self.steps[..., None].to(inverse)).to(self.matrix)

    @property
    def dim(self) -> int:
        """The head dimension D."""
        return self.matrix.shape[-1]

    @property
    def per_head(self) -> bool:
        """Whether each KV head has its own matrix."""
        return len(self.matrix) > 1


@dataclass(frozen=True)
class LayerRotations:
    """The key and value rotations of one layer: the same if one side is read as both."""

    key: Rotation
    value: Rotation
    sides: tuple[str, ...] = SIDES

    @classmethod
    def of_sides(cls, rotations: Mapping[str, Rotation]) -> "LayerRotations":
        """The rotations of a layer by its sides. Raises `KeyError` if one is missing."""
        cached = rows_of(rotations)
        key, value = cached.pair
        return cls(rotations[key], rotations[value], cached.sides)

    def __getitem__(self, side: str) -> Rotation:
        """The rotation of a side, or of what attention reads as `key` or as `value`."""
        return self.value if side == "value" else self.key


class Rotations(dict[int, LayerRotations]):
    """Layer index (of all layers of the model) -> rotations, for layers with a cache."""

    def __repr__(self) -> str:
        return f"Rotations({counted(len(self), 'layer')})"

    def each(self) -> Iterator[tuple[int, str, Rotation]]:
        """Yield `(layer, side, rotation)` for every layer, keys before values."""
        for layer, rotations in self.items():
            for side in rotations.sides:
                yield layer, side, rotations[side]

    def replace(self, change: Callable[[int, str, Rotation], Rotation]) -> "Rotations":
        """New rotations, each replaced by what `change(layer, side, rotation)` returns."""
        layers = {}
        for layer, rotations in self.items():
            changed = {side: change(layer, side, rotations[side]) for side in rotations.sides}
            layers[layer] = LayerRotations.of_sides(changed)
        return Rotations(layers)

    @property
    def sides(self) -> set[str]:
        """The sides that are rotated, as `rotationzoo.sides` names them."""
        return {side for _, side, _ in self.each()}

    @property
    def cached(self) -> CachedRows:
        """The rows that the model caches."""
        return rows_of(self.sides)

    @property
    def per_head(self) -> bool:
        """Whether any layer has one matrix per KV head."""
        return any(rotation.per_head for _, _, rotation in self.each())

    @property
    def has_transform(self) -> bool:
        """Whether there are layers, and all of their sides have the matrix of transform coding."""
        return bool(self) and all(each.transform is not None for _, _, each in self.each())

    @property
    def has_budget(self) -> bool:
        """Whether channels have different bits."""
        return any(rotation.widths is not None for _, _, rotation in self.each())

    @property
    def orthogonality_error(self) -> float:
        """The largest `|R R^T - I|` of all matrices, computed in float64."""
        return max(orthogonality_error(rotation.matrix) for _, _, rotation in self.each())
