"""Whether a model's weights can carry an equalizer, found by running it on `meta`.

Nothing here knows a model by name: what makes the queries, keys and values of each layer is traced.
"""

from dataclasses import replace

from transformers import PreTrainedModel

from rotationzoo.errors import UnsupportedModel
from rotationzoo.model.geometry import Geometry
from rotationzoo.model.key_classes import with_key_classes
from rotationzoo.model.key_scales import KeyScales
from rotationzoo.model.scale_trace import trace_labels
from rotationzoo.model.value_projections import find_projections


def check_values(model: PreTrainedModel, geometry: Geometry) -> str | None:
    """Why the weights of a model on `meta` cannot carry an equalizer of values, or None if they
    can: if the values of every layer may be multiplied by an invertible matrix."""
    try:
        find_projections(model, geometry, "the model")
    except UnsupportedModel as refusal:
        return str(refusal)
    return None


def with_equalizing(model: PreTrainedModel, geometry: Geometry) -> Geometry:
    """The geometry of a model on `meta`, with what equalizers need to know of every layer.

    Raises `UnsupportedModel` if the weights cannot carry an equalizer of keys: if those of any
    layer cannot be scaled exactly, or share factors in no known pattern.
    """
    scales = find_key_scales(model, geometry, "the model")
    fixed = check_values(model, geometry) is not None
    described = with_key_classes(geometry, scales.classes)
    return [replace(layer, fixed_values=fixed) for layer in described]


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
