"""The layers, heads and dimensions of imported rotations.

They come from the model that the user names, which the files must fit. Without a model they are
inferred from the files.
"""

from collections.abc import Iterator
from itertools import pairwise

from rotationzoo.artifact.manifest import hash_config
from rotationzoo.engines.gather import Files
from rotationzoo.engines.rotation_file import RotationFile
from rotationzoo.errors import RotationZooError, UnsupportedModel
from rotationzoo.geometry import Geometry, Layer, cached_layers, shifted_layers
from rotationzoo.model import centering, loading
from rotationzoo.model.geometry import geometry_on_meta
from rotationzoo.model.source import Source, find, has_weights, weights_fingerprint
from rotationzoo.rotations import LATENT

_CHECK = "check the model"
_NAME_IT = "name the model, which tells: --model MODEL"


def find_geometry(
    files: Files, model: str | None, revision: str | None
) -> tuple[Source | None, Geometry]:
    """The named model, or None, and the geometry.

    Raises `RotationZooError` for files that do not fit the model or contradict each other, and for
    latents without a model: they do not say what is cached beside them.
    """
    first = next(iter(files.values()))
    if model is None:
        if LATENT in files:
            beside = "which do not say what is cached beside them"
            raise RotationZooError(f"{first.path} holds rotations of latents, {beside}", _NAME_IT)
        return None, _geometry_of_files(**files)
    source = find(model, revision)
    geometry = geometry_on_meta(loading.on_meta(loading.load_config(source), source.name))
    if geometry is None:
        unknown = f"what {model} caches shows only with its weights"
        raise UnsupportedModel(unknown, hint="import without --model")
    if not files.keys() & {side for layer in geometry for side in layer.sides}:
        held = f"{first.path} holds rotations of {' and '.join(f'{side}s' for side in files)}"
        raise UnsupportedModel(f"{held}, and {model} is not known to cache any", _CHECK)
    _check_model(model, source, first)
    for side, file in files.items():
        for misfit in _misfits(side, file, geometry):
            raise RotationZooError(f"these files are not for {model}: {misfit}", _CHECK)
    # Engines subtract a key mean and never add it back, which changes what some models compute.
    if first.side == "key" and first.content.mean and (moved := shifted_layers(geometry)):
        changed = f"changes what {model} computes: {centering.reason(moved)}"
        hint = "import files that were made without a key mean"
        raise RotationZooError(f"{first.path.name} centers keys, which {changed}", hint)
    return source, geometry


def _geometry_of_files(key: RotationFile, value: RotationFile) -> Geometry:
    """The geometry that the files imply.

    Raises `RotationZooError` if layers may be missing. Layer numbers should be evenly spaced: by 1,
    or by the distance between a hybrid model's attention layers.
    """
    layers = sorted(key.content.rotation)
    steps = {after - before for before, after in pairwise(layers)}
    if len(steps) > 1:
        gap = next(before for before, after in pairwise(layers) if after - before > min(steps))
        irregular = "the numbers of those it has are irregular"
        raise RotationZooError(
            f"{key.path.name} may lack layers after layer {gap}: {irregular}", _NAME_IT
        )
    geometry = []
    for index in layers:
        matrices = key.content.rotation[index], value.content.rotation[index]
        counts = {len(matrix) for matrix in matrices if matrix.ndim == 3}
        mean = key.content.mean.get(index)
        if mean is not None and mean.ndim == 2:
            counts.add(len(mean))
        if len(counts) > 1:
            listed = " and ".join(map(str, sorted(counts)))
            raise RotationZooError(f"the files disagree on the KV heads of layer {index}: {listed}")
        # Files with one matrix per layer and no mean do not say how many KV heads there are.
        heads = counts.pop() if counts else 1
        key_dim, value_dim = (matrix.shape[-1] for matrix in matrices)
        geometry.append(Layer(index, index, heads, heads, key_dim, value_dim))
    return geometry


def _check_model(model: str, source: Source, file: RotationFile) -> None:
    """Raise `RotationZooError` if the file states another model than the user's."""
    stated = file.calibration
    config, weights = stated.get("config_sha256"), stated.get("weights_fingerprint")
    named = str(stated.get("model") or stated.get("model_path") or "")
    # Names are compared only for hub models: a local folder may have any name.
    other_name = source.revision is not None and _last(named) not in ("", _last(model))
    contradicts = config != hash_config(source.folder) if config else other_name
    made = f"{file.path.name} says that it was made for"
    if contradicts:
        hint = f"name that model: --model {named}" if named else _CHECK
        raise RotationZooError(f"{made} {named or 'another config'}, and not for {model}", hint)
    if weights and has_weights(source) and weights != weights_fingerprint(source):
        raise RotationZooError(f"{made} other weights than {model} has", _CHECK)


def _last(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1].lower()


def _misfits(side: str, file: RotationFile, geometry: Geometry) -> Iterator[str]:
    """Each difference between the layers of a model and those of a file."""
    layers, content = {layer.index: layer for layer in cached_layers(geometry)}, file.content
    for missing in sorted(layers.keys() - content.rotation.keys()):
        yield f"they have no {side} rotation for layer {missing}"
    for extra in sorted(content.rotation.keys() - layers.keys()):
        yield f"they have layer {extra}, which caches no {side}s there"
    for index, layer in layers.items():
        matrix, mean, dim = content.rotation[index], content.mean.get(index), layer.dims.get(side)
        wrong = matrix.shape[-1] != dim or (matrix.ndim == 3 and len(matrix) != layer.kv_heads)
        if mean is not None and mean.ndim == 2:
            wrong |= len(mean) not in (1, layer.kv_heads)  # one mean may serve all heads
        if wrong:
            yield (
                f"layer {index} has {layer.kv_heads} KV heads with {side}s of {dim}, the file "
                f"{list(matrix.shape)}"
            )
