"""The layers, heads and dimensions of imported rotations.

They come from the model that the user names, which the files must fit. Without a model they are
inferred from the files.
"""

from itertools import pairwise

from rotationzoo.artifact.manifest import hash_config
from rotationzoo.engines.base import SideMatrices
from rotationzoo.engines.rotation_file import Pair, RotationFile
from rotationzoo.errors import RotationZooError, UnsupportedModel
from rotationzoo.geometry import Geometry, Layer, cached_layers
from rotationzoo.model import loading
from rotationzoo.model.geometry import geometry_on_meta
from rotationzoo.model.source import Source, find, has_weights, weights_fingerprint


def find_geometry(
    pair: Pair, model: str | None, revision: str | None
) -> tuple[Source | None, Geometry]:
    """The named model, or None, and the geometry.

    Raises `RotationZooError` for files that do not fit the model or contradict each other.
    """
    if model is None:
        return None, _geometry_of_files(pair)
    source = find(model, revision)
    geometry = geometry_on_meta(loading.on_meta(loading.load_config(source), source.name))
    if geometry is None:
        raise UnsupportedModel(
            f"what {model} caches shows only with its weights", hint="import without --model"
        )
    _check_model(model, source, pair.key)
    for side, file in pair.items():
        _check_layers(model, side, file.content, geometry)
        for layer in cached_layers(geometry):
            _check_heads(model, side, file.content, layer)
    return source, geometry


def _geometry_of_files(pair: Pair) -> Geometry:
    """The geometry that the files imply.

    Raises `RotationZooError` if layers may be missing. Layer numbers should be evenly spaced: by 1,
    or by the distance between a hybrid model's attention layers.
    """
    layers = sorted(pair.key.content.rotation)
    steps = {after - before for before, after in pairwise(layers)}
    if len(steps) > 1:
        gap = next(before for before, after in pairwise(layers) if after - before > min(steps))
        raise RotationZooError(
            f"{pair.key.path.name} may lack layers after layer {gap}: the numbers of those it has "
            "are irregular",
            hint="name the model, which tells: --model MODEL",
        )
    return [_layer_of_files(layer, pair) for layer in layers]


def _layer_of_files(index: int, pair: Pair) -> Layer:
    key, value = pair.key.content, pair.value.content
    matrices = key.rotation[index], value.rotation[index]
    counts = {len(matrix) for matrix in matrices if matrix.ndim == 3}
    if index in key.mean and key.mean[index].ndim == 2:
        counts.add(len(key.mean[index]))
    if len(counts) > 1:
        listed = " and ".join(map(str, sorted(counts)))
        raise RotationZooError(f"the files disagree on the KV heads of layer {index}: {listed}")
    # Files with one matrix per layer and no mean do not say how many KV heads there are.
    heads = counts.pop() if counts else 1
    key_dim, value_dim = (matrix.shape[-1] for matrix in matrices)
    return Layer(index, index, heads, heads, key_dim, value_dim)


def _check_model(model: str, source: Source, key: RotationFile) -> None:
    """Raise `RotationZooError` if the file states another model than the user's."""
    config = key.calibration.get("config_sha256")
    named = str(key.calibration.get("model") or key.calibration.get("model_path") or "")
    if config:
        contradicts = config != hash_config(source.folder)
    else:  # names are compared only for hub models: a local folder may have any name
        contradicts = source.revision is not None and _last(named) not in ("", _last(model))
    if contradicts:
        raise RotationZooError(
            f"{key.path.name} says that it was made for {named or 'another config'}, and not for "
            f"{model}",
            hint=f"name that model: --model {named}" if named else "check the model",
        )
    weights = key.calibration.get("weights_fingerprint")
    if weights and has_weights(source) and weights != weights_fingerprint(source):
        raise RotationZooError(
            f"{key.path.name} says that it was made for other weights than {model} has",
            hint="check the model",
        )


def _last(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1].lower()


def _check_layers(model: str, side: str, content: SideMatrices, geometry: Geometry) -> None:
    cached = {layer.index for layer in cached_layers(geometry)}
    label = f"these files are not for {model}"
    if missing := sorted(cached - content.rotation.keys()):
        raise RotationZooError(
            f"{label}: they have no {side} rotation for layer {missing[0]}", hint="check the model"
        )
    if extra := sorted(content.rotation.keys() - cached):
        raise RotationZooError(
            f"{label}: they have layer {extra[0]}, which caches no {side}s there",
            hint="check the model",
        )


def _check_heads(model: str, side: str, content: SideMatrices, layer: Layer) -> None:
    matrix, mean = content.rotation[layer.index], content.mean.get(layer.index)
    dim = layer.dims[side]
    wrong = matrix.shape[-1] != dim or (matrix.ndim == 3 and len(matrix) != layer.kv_heads)
    if mean is not None and mean.ndim == 2:
        wrong |= len(mean) not in (1, layer.kv_heads)  # one mean may serve all heads
    if wrong:
        raise RotationZooError(
            f"these files are not for {model}: layer {layer.index} has {layer.kv_heads} KV heads "
            f"with {side}s of {dim}, the file {list(matrix.shape)}",
            hint="check the model",
        )
