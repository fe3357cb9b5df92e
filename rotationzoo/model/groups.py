"""Quantization groups: whether they divide the heads of a model."""

import math
from collections.abc import Collection

from rotationzoo.errors import RotationZooError
from rotationzoo.model.geometry import Geometry, cached_layers

_SMALLEST = 4  # channels: the codes of a byte, and what the kernels take


def check_group_size(group_size: int | None, dims: Collection[int]) -> None:
    """Raise `RotationZooError`, which lists the sizes that work, for a group of channels that does
    not divide each of these head dimensions. None stands for the whole head."""
    if group_size is None or all(dim % group_size == 0 for dim in dims):
        return
    common = math.gcd(*dims)
    smaller = [str(size) for size in range(_SMALLEST, common, 4) if common % size == 0]
    heads = " and ".join(map(str, sorted(dims)))
    raise RotationZooError(
        f"groups of {group_size} channels do not divide heads of {heads} channels, but groups of "
        f"{', '.join([*smaller, str(common)])} do",
        hint="give one of these as the group size, or none for the whole head",
    )


def head_dims(geometry: Geometry) -> set[int]:
    """The dimensions of all cached keys and values."""
    return {dim for layer in cached_layers(geometry) for dim in (layer.key_dim, layer.value_dim)}
