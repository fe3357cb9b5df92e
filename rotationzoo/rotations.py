"""The rotations of a model: for the keys and the values of every cached layer a matrix, with its
clip ratios and means.

Pure tensors: only `artifact.layout` knows their names in an artifact's files.
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
    """Of the statistic behind the matrix, `[H, D]`, ascending; None where imported files lack
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
    """Layer index -> rotations, for the layers that have a cache. Indices count all layers of the
    model."""

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
        """`(layer, side, rotation)` of every layer, keys before values."""
        for layer, sides in self._layers.items():
            for side in SIDES:
                yield layer, side, sides[side]

    def replace(self, change: Callable[[int, str, Rotation], Rotation]) -> "Rotations":
        """New rotations, each as `change(layer, side, rotation)` returns it."""
        return Rotations(
            {
                layer: LayerRotations(
                    key=change(layer, "key", sides.key), value=change(layer, "value", sides.value)
                )
                for layer, sides in self._layers.items()
            }
        )

    def with_clip(self, side: str, ratio: float) -> "Rotations":
        """The same rotations with one clip ratio for all heads of a side."""

        def set_clip(layer: int, rotation_side: str, rotation: Rotation) -> Rotation:
            if rotation_side != side:
                return rotation
            return replace(rotation, clip=torch.full_like(rotation.clip, ratio))

        return self.replace(set_clip)

    def with_side(self, side: str, other: "Rotations") -> "Rotations":
        """The same rotations with the keys, or the values, of others of the same layers."""

        def choose(layer: int, rotation_side: str, rotation: Rotation) -> Rotation:
            return other[layer][side] if rotation_side == side else rotation

        return self.replace(choose)

    @property
    def per_head(self) -> bool:
        """Whether any layer's KV heads have a matrix each."""
        return any(rotation.per_head for _, _, rotation in self.each())

    @property
    def orthogonality_error(self) -> float:
        """The largest `|R R^T - I|` of all matrices, computed in float64."""
        return max(orthogonality_error(rotation.matrix) for _, _, rotation in self.each())
