"""How the parameters of a model change when its weights take over a part of an artifact."""

import torch
from transformers import PreTrainedModel

from rotationzoo.artifact.store import Artifact
from rotationzoo.engines.weight_edits import Change, multiply_columns, multiply_rows, scale_rows
from rotationzoo.errors import UnsupportedModel, as_unavailable
from rotationzoo.model.foldable import find_key_scales
from rotationzoo.model.geometry import Geometry, geometry_on_meta, same_shapes
from rotationzoo.model.value_projections import SERVE_UNABSORBED, find_projections

Changes = dict[str, Change]
"""Parameter name -> its change."""


def rotation_changes(artifact: Artifact, model: PreTrainedModel, name: str) -> Changes:
    """The changes after which a model on `meta` computes values that are rotated already."""
    geometry = checked_geometry(artifact, model, name)
    matrices = {layer: sides.value.matrix for layer, sides in artifact.rotations.items()}
    return _value_changes(matrices, model, geometry, name)


def equalizer_changes(artifact: Artifact, model: PreTrainedModel, name: str) -> Changes:
    """The changes after which a model on `meta` computes keys and values that are equalized
    already. A side without an equalizer, or with identities in its place, keeps its weights."""
    geometry = checked_geometry(artifact, model, name)
    changes: Changes = {}
    for side, changes_of_side in (("key", _key_changes), ("value", _value_changes)):
        equalizers = {layer: sides[side].equalizer for layer, sides in artifact.rotations.items()}
        given = {layer: tensor for layer, tensor in equalizers.items() if tensor is not None}
        if all(map(_does_nothing, given.values())):
            continue
        for parameter, change in changes_of_side(given, model, geometry, name).items():
            earlier = changes.get(parameter)  # of a projection of keys and values
            changes[parameter] = change if earlier is None else earlier.then(change)
    return changes


def _does_nothing(equalizer: torch.Tensor) -> bool:
    neutral = torch.ones_like(equalizer)
    if equalizer.ndim == 3:  # matrices, and not factors
        neutral = torch.eye(equalizer.shape[-1]).expand_as(equalizer)
    return torch.equal(equalizer, neutral)


def checked_geometry(artifact: Artifact, model: PreTrainedModel, name: str) -> Geometry:
    """The geometry of a model on `meta`. Raises `UnsupportedModel` if it is not the artifact's."""
    with as_unavailable(f"{name} fails when it runs"):
        geometry = geometry_on_meta(model)
    if geometry is None or not same_shapes(geometry, artifact.geometry):
        raise UnsupportedModel(
            f"what the layers of {name} do cannot be checked without its weights",
            hint=SERVE_UNABSORBED,
        )
    return geometry


def _value_changes(
    matrices: dict[int, torch.Tensor], model: PreTrainedModel, geometry: Geometry, name: str
) -> Changes:
    """The changes after which values `v` are `v @ matrix`, and the model computes what it did.

    `matrices`: layer -> invertible `[H, D, D]`. H is 1 if all KV heads share one.
    """
    changes: Changes = {}
    projections = find_projections(model, geometry, name)
    for layer, (value, output, first_row) in zip(geometry, projections, strict=True):
        matrix = matrices[layer.index].double().expand(layer.kv_heads, -1, -1)
        for part, tensor in model.get_submodule(value).named_parameters():  # weight and bias
            changes[f"{value}.{part}"] = Change(tensor.shape, multiply_rows(matrix, first_row))
        shape = model.get_parameter(f"{output}.weight").shape
        # The output projection has a block of columns per query head. With GQA, the query heads of
        # a group all undo the matrix of the same KV head.
        inverse = torch.linalg.inv(matrix).repeat_interleave(layer.group, 0)
        changes[f"{output}.weight"] = Change(shape, multiply_columns(inverse))
    return changes


def _key_changes(
    factors: dict[int, torch.Tensor], model: PreTrainedModel, geometry: Geometry, name: str
) -> Changes:
    """The changes after which keys `k` are `k * factors`, and queries are divided by them.

    `factors`: layer -> `[KV heads, D]`.
    """
    changes: Changes = {}
    for scaling in find_key_scales(model, geometry, name).scalings(factors):
        weight = scaling.weight
        parts = dict(model.get_submodule(weight.module).named_parameters(recurse=False))
        # Of a linear module, the weight and the bias.
        names = parts if weight.is_projection else [weight.name]
        for part in names:
            transform = scale_rows(scaling.factors, scaling.offset)
            changes[f"{weight.module}.{part}"] = Change(parts[part].shape, transform)
    return changes
