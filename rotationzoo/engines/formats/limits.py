"""Limits on a model's geometry that several engines share."""

from rotationzoo.engines.base import Payload
from rotationzoo.errors import RotationZooError
from rotationzoo.model.geometry import cached_layers

PAGE = "docs/engines.md says what each engine takes"
"""The hint for limits that no flag can lift."""


def check_power_of_two(engine: str, payload: Payload) -> None:
    """Raise `RotationZooError` if a head dimension is not a power of two."""
    for dim in sorted(payload.head_dims):
        if dim & (dim - 1):
            raise RotationZooError(
                f"{engine} cannot run head dimension {dim}: only powers of two", hint=PAGE
            )


def check_equal_dims(engine: str, payload: Payload) -> None:
    """Raise `RotationZooError` if the keys and values of a layer differ in head dimension."""
    for layer in cached_layers(payload.geometry):
        if layer.key_dim != layer.value_dim:
            raise RotationZooError(
                f"{engine} cannot run keys of dimension {layer.key_dim} with values of dimension "
                f"{layer.value_dim}",
                hint=PAGE,
            )


def check_one_group_size(engine: str, payload: Payload) -> None:
    """Raise `RotationZooError` if one group size cannot describe the groups of every layer.

    That is so if groups are whole heads and the head dimensions differ.
    """
    dims = payload.head_dims
    if payload.group_size is None and len(dims) > 1:
        raise RotationZooError(
            f"{engine} takes one group size, and this artifact's groups are whole heads of "
            f"{sorted(dims)} channels",
            hint=PAGE,
        )
