"""Writing a copy of a model whose weights take over a part of an artifact, so that it costs nothing
to serve: the rotation of the values, or the equalizers of keys and values."""

from pathlib import Path

from transformers import PretrainedConfig

from rotationzoo.artifact.store import Artifact
from rotationzoo.artifact.weights import EQUALIZER, RECORD, VALUE_ROTATION, read_record, record_text
from rotationzoo.checks.verify import verify
from rotationzoo.engines.weight_changes import equalizer_changes, rotation_changes
from rotationzoo.engines.weight_copy import write_changed_copy
from rotationzoo.errors import RotationZooError, UnsupportedModel
from rotationzoo.model import loading
from rotationzoo.model.fetching import fetch_weights
from rotationzoo.model.rope import same_scaling, scaling_of
from rotationzoo.model.source import Source, fetch, find, weights_fingerprint
from rotationzoo.progress import Progress, silent


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
            f"{artifact.folder} was made for other weights than those of {model}", hint=calibrate
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
