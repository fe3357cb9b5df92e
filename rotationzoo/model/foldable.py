"""Whether a model's weights can carry an equalizer, found by running it on `meta`.

Nothing here knows a model by name: what makes the queries, keys and values of each layer is traced.
"""

from transformers import PreTrainedModel

from rotationzoo.errors import UnsupportedModel
from rotationzoo.model.geometry import Geometry
from rotationzoo.model.key_scales import KeyScales
from rotationzoo.model.label_run import trace_labels
from rotationzoo.model.value_projections import find_projections


def check_equalizable(model: PreTrainedModel, geometry: Geometry) -> str | None:
    """Why the weights of a model on `meta` cannot carry an equalizer, or None if they can.

    They can if the keys of every cached layer may have a factor for each RoPE pair of channels, and
    its values may be multiplied by an invertible matrix.
    """
    name = "the model"
    try:
        find_key_scales(model, geometry, name)
        find_projections(model, geometry, name)
    except UnsupportedModel as refusal:
        return str(refusal)
    return None


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
