"""Writing a copy of a model whose weights rotate its values, or its latents, which then costs
nothing to serve."""

from functools import partial
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel

from rotationzoo.artifact.store import Artifact
from rotationzoo.checks.verify import verify
from rotationzoo.engines import weight_edits as edits
from rotationzoo.errors import RotationZooError, UnsupportedModel
from rotationzoo.geometry import Geometry, cached_layers, has_latents, same_shapes
from rotationzoo.linalg.orthogonality import invert
from rotationzoo.model import loading
from rotationzoo.model.absorbed import RECORD, read_record, record_text
from rotationzoo.model.geometry import geometry_on_meta
from rotationzoo.model.latent import DOWN, NORM, UP, find_latent_parts
from rotationzoo.model.quantized import quantization_of
from rotationzoo.model.rope import same_scaling, scaling_of
from rotationzoo.model.source import fetch, fetch_weights, find, weights_fingerprint
from rotationzoo.model.value_projections import SERVE_UNABSORBED, find_projections
from rotationzoo.progress import Progress, silent

Changes = dict[str, edits.Change]
"""Parameter name -> its change."""


def rotation_changes(artifact: Artifact, model: PreTrainedModel, name: str) -> Changes:
    """The changes after which a model on `meta` computes values that are rotated already.

    Raises `UnsupportedModel` if its geometry is not the artifact's, or if a layer cannot absorb a
    rotation.
    """
    geometry = geometry_on_meta(model)
    if geometry is None or not same_shapes(geometry, artifact.geometry):
        raise UnsupportedModel(
            f"what the layers of {name} do cannot be checked without its weights",
            hint=SERVE_UNABSORBED,
        )
    if has_latents(geometry):
        return _latent_changes(artifact, model, geometry, name)
    changes: Changes = {}
    projections = find_projections(model, geometry, name)
    for layer, (value, output) in zip(geometry, projections, strict=True):
        matrix = artifact.rotations[layer.index].value.matrix.double()
        matrix = matrix.expand(layer.kv_heads, -1, -1)
        for part, tensor in model.get_submodule(value).named_parameters():  # weight and bias
            changes[f"{value}.{part}"] = edits.Change(tensor.shape, edits.multiply_rows(matrix))
        shape = model.get_parameter(f"{output}.weight").shape
        # The output projection has a block of columns per query head. With GQA, the query heads of
        # a group all undo the matrix of the same KV head.
        inverse = invert(matrix).repeat_interleave(layer.group, 0)
        changes[f"{output}.weight"] = edits.Change(shape, edits.multiply_columns(inverse))
    return changes


def _latent_changes(
    artifact: Artifact, model: PreTrainedModel, geometry: Geometry, name: str
) -> Changes:
    """The changes after which a model on `meta` computes latents that are rotated already.

    A latent is the row x of a projection, normalized and times the weights g of a norm:
    `c = n(x) g`. An orthogonal R leaves the norm of a row as it is, so `n(x R) = n(x) R`. The
    weights g stand between, and move on into the projection that reads c: the copy caches
    `n(x) R`, and makes heads of it by `W diag(g) R` in place of W. Raises `UnsupportedModel` for
    another norm.
    """
    paths = find_latent_parts(model, name)
    changes: Changes = {}
    for layer in cached_layers(geometry):
        # The nearest orthogonal matrix: imported ones of half precision would change norms.
        left, _, right = torch.linalg.svd(artifact.rotations[layer.index].key.matrix[0].double())
        matrix, path = left @ right, paths[layer.index]
        for part, tensor in model.get_submodule(f"{path}.{DOWN}").named_parameters():
            changes[f"{path}.{DOWN}.{part}"] = edits.Change(
                tensor.shape, _rotate_first_rows(matrix)
            )
        norm, up = f"{path}.{NORM}.weight", f"{path}.{UP}.weight"
        changes[norm] = edits.Change(model.get_parameter(norm).shape, torch.ones_like)
        shape = model.get_parameter(up).shape
        changes[up] = edits.Change(shape, _read_rotated(matrix), reads=norm)
    return changes


def _rotate_first_rows(matrix: torch.Tensor) -> edits.Transform:
    """Rotate the latent that a projection computes, and leave the key with RoPE after it."""
    rank = len(matrix)
    return lambda tensor: torch.cat([matrix.mT @ tensor[:rank], tensor[rank:]])


def _read_rotated(matrix: torch.Tensor) -> edits.Transform:
    """Read rotated latents that lack the scales of their norm."""
    return lambda weight, scales: (weight * scales) @ matrix


def absorb(artifact: Artifact, model: str, output: Path, progress: Progress = silent) -> Path:
    """Write a copy of a model whose cache holds `v @ R` to a new folder, and return the folder.

    Holds only one tensor in memory at a time. Raises `RotationZooError` before anything is written
    if the artifact is damaged or made for another model, the output exists, the weights are
    quantized or changed already, or (`UnsupportedModel`) a layer cannot absorb a rotation.
    """
    if output.exists():
        raise RotationZooError(f"{output} is there already", "choose another place with --output")
    progress("looking at the model", 0, 0)
    made_for, calibrate = artifact.manifest.model, f"make one with: rotationzoo calibrate {model}"
    # The artifact's revision applies only to the hub id that it was made for.
    is_hub_id = made_for.id == model and not Path(model).is_dir()
    source = find(model, made_for.revision if is_hub_id else None)
    fetch(source, weights=False)
    if read_record(source.folder):
        carried = f"the weights of {model} carry the value rotation of an artifact already"
        raise RotationZooError(f"{carried}, says its {RECORD}", hint="give the model before that")
    config = loading.load_config(source)
    _check_not_quantized(config, model)
    _check_scaling(artifact, config, model)
    if problems := verify(artifact, model, source.revision).problems:
        raise RotationZooError(f"{artifact.folder} does not fit {model}: {problems[0]}", calibrate)
    changes = rotation_changes(artifact, loading.on_meta(config, model), model)
    fetch_weights(source, progress)
    # For a model from the hub, `verify` had no weights yet to compare fingerprints with.
    if made_for.weights_fingerprint not in (None, weights_fingerprint(source)):
        raise RotationZooError(
            f"{artifact.folder} was made for other weights than {model} has", hint=calibrate
        )
    record_of = partial(record_text, artifact, source)
    edits.write_changed_copy(source, changes, record_of, output, progress)
    return output


def _check_scaling(artifact: Artifact, config: PretrainedConfig, model: str) -> None:
    """Raise `RotationZooError` for an artifact that was calibrated with scaled RoPE, unless the
    config scales it so: whoever serves the copy would know nothing of the scaling."""
    wanted = artifact.recipe.rope_scaling
    if not same_scaling(wanted, scaling_of(config)):
        raise RotationZooError(
            f"{artifact.folder} was calibrated with the rope scaling {wanted}, and a copy of "
            f"{model} would run without it, because it gets the model's own config",
            hint="put the scaling into config.json of a folder of the model, and calibrate that "
            "without --rope-scaling",
        )


def _check_not_quantized(config: PretrainedConfig, model: str) -> None:
    if quantization_of(config) is not None:
        raise UnsupportedModel(
            f"the weights of {model} are quantized in blocks, which cannot carry a rotation",
            hint="absorb into the weights that it was quantized from, and quantize those",
        )
