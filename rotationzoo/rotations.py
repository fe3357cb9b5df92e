"""The rotations of a model: for keys and values of every cached layer a matrix, and what it is
served with.

Pure tensors. Which names they have in an artifact's files is known to `artifact.layout` alone.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from rotationzoo.linalg.compositions import orthogonality_error

SIDES = ("key", "value")


@dataclass(frozen=True)
class Rotation:
    """One side of one layer: keys or values `x` are stored as `(x - mean) matrix`, clipped."""

    matrix: torch.Tensor
    """`[H, D, D]` float32; H is 1 where the KV heads share one."""
    clip: torch.Tensor
    """Clip ratios `[KV heads]`, float64; 1 is off."""
    eigenvalues: torch.Tensor | None = None
    """`[H, D]` ascending, of the statistic behind the matrix; None where imported files do not have
    them."""
    mean: torch.Tensor | None = None
    """`[KV heads, D]`, subtracted before the rotation; None where the recipe does not centre."""

    @property
    def dim(self) -> int:
        """The head dimension D."""
        return self.matrix.shape[-1]

    @property
    def per_head(self) -> bool:
        """Whether the KV heads have a matrix each."""
        return len(self.matrix) > 1


@dataclass(frozen=True)
class LayerRotations:
    """The two sides of one layer."""

    key: Rotation
    value: Rotation

    def __getitem__(self, side: str) -> Rotation:
        """`key` or `value`."""
        return {"key": self.key, "value": self.value}[side]


class Rotations(Mapping[int, LayerRotations]):
    """Layer index, counted over all layers of the model -> its rotations, of the layers that have a
    cache."""

    def __init__(self, layers: Mapping[int, LayerRotations]):
        self._layers = dict(layers)

    def __getitem__(self, layer: int) -> LayerRotations:
        return self._layers[layer]

    def __iter__(self) -> Iterator[int]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def __repr__(self) -> str:
        return f"Rotations({len(self)} layers)"

    def each(self) -> Iterator[tuple[int, str, Rotation]]:
        """`(layer, side, rotation)`, keys before values."""
        for layer, sides in self._layers.items():
            for side in SIDES:
                yield layer, side, sides[side]

    def replace(self, change: Callable[[int, str, Rotation], Rotation]) -> "Rotations":
        """With every rotation as `change(layer, side, rotation)` returns it."""
        layers = {}
        for layer, sides in self._layers.items():
            key, value = (change(layer, side, sides[side]) for side in SIDES)
            layers[layer] = LayerRotations(key, value)
        return Rotations(layers)

    def with_clip(self, side: str, ratio: float) -> "Rotations":
        """With one clip ratio for all heads of a side."""

        def clip(layer: int, of: str, rotation: Rotation) -> Rotation:
            if of != side:
                return rotation
            return replace(rotation, clip=torch.full_like(rotation.clip, ratio))

        return self.replace(clip)

    def with_side(self, side: str, other: "Rotations") -> "Rotations":
        """With the keys, or the values, of other rotations of the same layers."""
        return self.replace(
            lambda layer, of, rotation: other[layer][of] if of == side else rotation
        )

    @property
    def per_head(self) -> bool:
        """Whether any layer's KV heads have a matrix each."""
        return any(rotation.per_head for _, _, rotation in self.each())

    @property
    def orthogonality_error(self) -> float:
        """The largest `|R R^T - I|` of all matrices, computed in float64."""
        return max(orthogonality_error(rotation.matrix) for _, _, rotation in self.each())
