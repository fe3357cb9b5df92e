"""Whether a model's weights can carry an equalizer, found by running it on `meta`.

Nothing here knows a model by name: what makes the queries, keys and values of each layer is traced.
"""

from dataclasses import replace

from transformers import PreTrainedModel

from rotationzoo.errors import UnsupportedModel
from rotationzoo.model.geometry import Geometry
from rotationzoo.model.key_scales import KeyScales
from rotationzoo.model.label_run import trace_labels
from rotationzoo.model.value_projections import find_projections


def check_equalizable(model: PreTrainedModel, geometry: Geometry) -> str | None:
    """Why the weights of a model on `meta` cannot carry an equalizer of keys, or None if they can:
    if the keys of every cached layer may have a factor for each RoPE pair of channels."""
    try:
        find_key_scales(model, geometry, "the model")
    except UnsupportedModel as refusal:
        return str(refusal)
    return None


def check_values(model: PreTrainedModel, geometry: Geometry) -> str | None:
    """Why the weights of a model on `meta` cannot carry an equalizer of values, or None if they
    can: if the values of every layer may be multiplied by an invertible matrix."""
    try:
        find_projections(model, geometry, "the model")
    except UnsupportedModel as refusal:
        return str(refusal)
    return None


def with_fixed_values(model: PreTrainedModel, geometry: Geometry) -> Geometry:
    """The geometry of a model on `meta`, with what `check_values` says in every layer."""
    fixed = check_values(model, geometry) is not None
    return [replace(layer, fixed_values=fixed) for layer in geometry]


def find_key_scales(model: PreTrainedModel, geometry: Geometry, name: str) -> KeyScales:
    """The weights that scale the queries and keys of a model on `meta`.

    Raises `UnsupportedModel` for a layer whose keys no weight can scale exactly.
    """
    scales = KeyScales(trace_labels(model, name), geometry)
    if problem := scales.problem():
        layer, reason = problem
        raise UnsupportedModel(
            f"layer {layer} of {name} has keys that cannot be scaled exactly: {reason}"
        )
    return scales
