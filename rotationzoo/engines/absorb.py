"""Writing a copy of a model whose weights take over a part of an artifact, so that it costs nothing
to serve: the rotation of the values, or the equalizers of keys and values.
"""

from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel

from rotationzoo.artifact.store import Artifact
from rotationzoo.artifact.weights import EQUALIZER, RECORD, VALUE_ROTATION, read_record, record_text
from rotationzoo.checks.verify import verify
from rotationzoo.engines.weight_edits import (
    Change,
    multiply_columns,
    multiply_rows,
    scale_rows,
    write_changed_copy,
)
from rotationzoo.errors import RotationZooError, UnsupportedModel, as_unavailable
from rotationzoo.model import loading
from rotationzoo.model.geometry import Geometry, geometry_on_meta, same_shapes
from rotationzoo.model.key_scales import find_key_scales
from rotationzoo.model.rope import same_scaling, scaling_of
from rotationzoo.model.source import Source, fetch, fetch_weights, find, weights_fingerprint
from rotationzoo.model.value_projections import SERVE_UNABSORBED, find_projections
from rotationzoo.progress import Progress, silent

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


def absorb(artifact: Artifact, model: str, output: Path, progress: Progress = silent) -> Path:
    """Write a copy of a model whose cache holds `v @ R` to a new folder, and return the folder.

    Holds only one tensor in memory at a time. Raises `RotationZooError` before anything is written
    if the artifact is damaged, equalized or made for another model, the output exists, the weights
    are quantized or changed already, or (`UnsupportedModel`) a layer cannot absorb a rotation.
    """
    if artifact.recipe.equalize:
        raise RotationZooError(
            f"{artifact.folder} is equalized, which goes into the weights of keys and values both",
            hint=f"fold it with: rotationzoo export {artifact.folder} --absorb {model}",
        )
    return _write(artifact, model, output, progress, VALUE_ROTATION)


def fold(artifact: Artifact, model: str, output: Path, progress: Progress = silent) -> Path:
    """Write a copy of a model whose cache holds equalized keys and values, `k * f` and `v @ E`.

    Returns the new folder. Raises as `absorb` does, and for an artifact that is not equalized.
    """
    if not artifact.recipe.equalize:
        raise RotationZooError(
            f"{artifact.folder} is not equalized: there is nothing to fold but its value rotation",
            hint=f"for that: rotationzoo export {artifact.folder} --absorb-values {model}",
        )
    return _write(artifact, model, output, progress, EQUALIZER)


def _write(artifact: Artifact, model: str, output: Path, progress: Progress, absorbed: str) -> Path:
    if output.exists():
        raise RotationZooError(
            f"{output} is there already", hint="choose another place with --output"
        )
    progress("looking at the model", 0, 0)
    made_for, calibrate = artifact.manifest.model, f"make one with: rotationzoo calibrate {model}"
    # The artifact's revision applies only to the hub id that it was made for.
    is_hub_id = made_for.id == model and not Path(model).is_dir()
    source = find(model, made_for.revision if is_hub_id else None)
    fetch(source, weights=False)
    if record := read_record(source.folder):
        raise RotationZooError(
            f"the weights of {model} carry the {record.absorbed} of an artifact already, says its "
            f"{RECORD}",
            hint="give the model before that",
        )
    config = loading.load_config(source)
    _check_not_quantized(config, model)
    _check_scaling(artifact, config, model)
    if problems := verify(artifact, model, source.revision).problems:
        raise RotationZooError(
            f"{artifact.folder} does not fit {model}: {problems[0]}", hint=calibrate
        )
    changes_of = rotation_changes if absorbed == VALUE_ROTATION else equalizer_changes
    changes = changes_of(artifact, loading.on_meta(config, model), model)
    fetch_weights(source, progress)
    # For a model from the hub, `verify` had no weights yet to compare fingerprints with.
    if made_for.weights_fingerprint not in (None, weights_fingerprint(source)):
        raise RotationZooError(
            f"{artifact.folder} was made for other weights than {model} has", hint=calibrate
        )

    def record_of(copy: Source) -> bytes:
        return record_text(artifact, absorbed, source, copy)

    write_changed_copy(source, changes, record_of, output, progress)
    return output


def _check_scaling(artifact: Artifact, config: PretrainedConfig, model: str) -> None:
    """Raise `RotationZooError` for an artifact that was calibrated with scaled RoPE, unless the
    config scales it so: whoever serves the copy would know nothing of the scaling."""
    wanted, present = artifact.recipe.rope_scaling, scaling_of(config)
    if wanted is not None and not (present and same_scaling(wanted, present)):
        raise RotationZooError(
            f"{artifact.folder} was calibrated with the rope scaling {wanted}, and a copy of "
            f"{model} would run without it, because it gets the model's own config",
            hint="put the scaling into config.json of a folder of the model, and calibrate that "
            "without --rope-scaling",
        )


def _check_not_quantized(config: PretrainedConfig, model: str) -> None:
    # The config of a multimodal model may keep the entry in its text part.
    for part in (config, config.get_text_config(decoder=True)):
        if getattr(part, "quantization_config", None):
            raise UnsupportedModel(
                f"the weights of {model} are quantized in blocks, which cannot carry a rotation or "
                "an equalizer",
                hint="absorb into the weights that it was quantized from, and quantize those",
            )
