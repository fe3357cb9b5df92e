"""Checks that the chosen layers, artifacts and texts fit the evaluated model.

What does not fit is refused. What fits with reservations becomes a note in the report.
"""

import shlex

from transformers import PretrainedConfig

from rotationzoo.artifact.store import Artifact
from rotationzoo.errors import RotationZooError, UsageError
from rotationzoo.geometry import (
    Geometry,
    check_group_size,
    has_latents,
    head_dims,
    same_shapes,
    shifted_layers,
)
from rotationzoo.model import centering
from rotationzoo.model.loading import load_config
from rotationzoo.model.rope import complete_scaling, position_count, same_scaling, scaling_of
from rotationzoo.model.source import Source, config_hash, weights_fingerprint
from rotationzoo.recipe import Data
from rotationzoo.recipe.rope_scaling import normalize
from rotationzoo.text.documents import HELD_OUT
from rotationzoo.text.rows import Corpus
from rotationzoo.words import counted


def check_layers(model: str, layers: set[int], geometry: Geometry) -> None:
    """Raise `UsageError` for a layer that has no attention or reads another layer's cache."""
    owners = {layer.index: layer.owner for layer in geometry}
    if unknown := layers - owners.keys():
        known = _describe_layers(set(owners))
        raise UsageError(
            f"{model} has no attention in layer {min(unknown)}: it has layers {known}",
            hint="give some of these, as --layers 0,4-7",
        )
    # A shared cache is stored once, with its owner's rotations, so only the owner can be chosen.
    sharing = sorted(layer for layer in layers if owners[layer] != layer)
    if sharing:
        owner = owners[sharing[0]]
        raise UsageError(
            f"layer {sharing[0]} of {model} stores nothing: it reads the cache of layer {owner}",
            hint=f"name that layer: --layers {owner}",
        )


def check_artifacts(model: str, artifacts: list[Artifact], geometry: Geometry) -> None:
    """Raise `RotationZooError` for an artifact that is bound to no model, that was made for a model
    with other shapes, whose quantization groups do not divide the heads, or whose rotations are
    damaged."""
    for artifact in artifacts:
        check_bound(artifact, model)
        made_for = artifact.manifest.has_latents
        if made_for != has_latents(geometry):
            rows = "latents (MLA)", "keys and values of heads"
            of, cached = rows if made_for else reversed(rows)
            raise RotationZooError(
                f"{artifact.folder} holds rotations of {of}, and {model} caches {cached}",
                hint=f"make one with: rotationzoo calibrate {shlex.quote(model)}",
            )
        if not same_shapes(artifact.geometry, geometry):
            raise RotationZooError(
                f"{artifact.folder} was made for a model of other layers, heads or dimensions than "
                f"{model}: {artifact.manifest.model.id}",
                hint=f"make one with: rotationzoo calibrate {shlex.quote(model)}",
            )
        check_group_size(artifact.recipe.group_size, head_dims(geometry))
        _ = artifact.rotations  # read now, because weights may take hours to fetch


def check_bound(artifact: Artifact, model: str) -> None:
    """Raise `RotationZooError` for an artifact that is bound to no model."""
    if not artifact.bound:
        raise RotationZooError(
            f"{artifact.folder} is bound to no model",
            hint=f"import its files again with --model {model}",
        )


def settle_rope_scaling(asked: str | None, artifacts: list[Artifact], source: Source) -> str | None:
    """The scaling of RoPE that the model runs with: the one that was asked for, or else that of the
    artifacts which were calibrated with one.

    `yarn:2` and `yarn:2:8192` are the same for a model of 8,192 positions. Raises `UsageError` for
    a scaling that cannot be, and `RotationZooError` for artifacts that were calibrated with
    another.
    """
    try:
        scaling = None if asked is None else normalize(asked)
    except ValueError as error:
        raise UsageError(f"--rope-scaling {error}", hint="--rope-scaling yarn:4") from error
    for artifact in artifacts:
        calibrated = artifact.recipe.rope_scaling
        scaling = scaling or calibrated
        if calibrated is None or scaling is None or calibrated == scaling:
            continue
        config = load_config(source)
        if complete_scaling(calibrated, config) != complete_scaling(scaling, config):
            others = f"give it alone, or with artifacts of --rope-scaling {calibrated}"
            raise RotationZooError(
                f"{artifact.folder} was calibrated with the rope scaling {calibrated}, "
                f"not {scaling}",
                hint=others if asked is None else "leave --rope-scaling out, or name others",
            )
    return scaling


def check_rope(artifact: Artifact, config: PretrainedConfig) -> None:
    """Raise `RotationZooError` for a model that runs without the scaling of RoPE with which an
    artifact was calibrated."""
    wanted, present = artifact.recipe.rope_scaling, scaling_of(config)
    if not same_scaling(wanted, present):
        raise RotationZooError(
            f"{artifact.folder} was calibrated with the rope scaling {wanted}, and this model runs "
            f"{f'with {present}' if present else 'without'}",
            hint="load the model with the same scaling in the rope_parameters of its config",
        )


def rope_notes(artifacts: list[Artifact], scaling: str | None) -> list[str]:
    """Notes on the scaling of RoPE that the model runs with, and on artifacts that were calibrated
    without."""
    if scaling is None:
        return []
    notes = [f"the model's RoPE is scaled by {scaling}"]
    for artifact in artifacts:
        if artifact.recipe.rope_scaling is None:
            notes.append(f"{artifact.folder.resolve().name} was calibrated without that scaling")
    return notes


def notes_for_reader(
    text: Corpus, source: Source, artifacts: list[Artifact], geometry: Geometry
) -> list[str]:
    """Notes that qualify the figures.

    They report text that fell short, and artifacts that were made for other weights, were
    calibrated on this very text, or center keys although this model's attention does not allow it.
    """
    notes = []
    if text.note:
        notes.append(text.note)
    for artifact in artifacts:
        name = artifact.folder.resolve().name
        if note := other_weights_note(artifact, source):
            notes.append(note)
        calibration = artifact.manifest.calibration
        if calibration is not None and calibration.fingerprint == text.fingerprint:
            notes.append(f"{name} was calibrated on this very text")
        if artifact.recipe.center_keys and (layers := shifted_layers(geometry)):
            reason = centering.reason(layers)
            notes.append(f"{name} centers keys, which changes what this model computes: {reason}")
    return notes


def check_weights(artifacts: list[Artifact], source: Source, anyway: bool) -> None:
    """Raise `RotationZooError` for artifacts that are known to be made for other weights than a
    model's, unless the user wants them anyway. The weights must be on this machine."""
    for note in filter(None, (other_weights_note(artifact, source) for artifact in artifacts)):
        if not anyway:
            model = shlex.quote(source.name)
            raise RotationZooError(
                note, hint=f"make one with: rotationzoo calibrate {model}; or add --anyway"
            )


def other_weights_note(artifact: Artifact, source: Source) -> str | None:
    """A note for an artifact that was made for other weights than these, or None."""
    if not _of_other_weights(artifact, source):
        return None
    return f"{artifact.folder.resolve().name} was made for other weights than {source.name} has"


def _of_other_weights(artifact: Artifact, source: Source) -> bool:
    """Whether an artifact is known to have been made for another config or other weights."""
    model = artifact.manifest.model
    if model.config_sha256 != config_hash(source):
        return True
    # Imported files do not always state which weights they were made for.
    fingerprint = model.weights_fingerprint
    return bool(fingerprint) and fingerprint != weights_fingerprint(source)


def _describe_layers(layers: set[int]) -> str:
    """A range such as `0 to 27`, or a list if the numbers have gaps."""
    first, last = min(layers), max(layers)
    if layers == set(range(first, last + 1)):
        return f"{first} to {last}"
    return str(sorted(layers))


# ---- the text that is judged on


def judged_text(data: Data) -> Data:
    """The text to evaluate on. For `bundled` this is the held-out text, not the one that artifacts
    are calibrated on by default."""
    if data.source == "bundled":
        return data.model_copy(update={"source": str(HELD_OUT)})
    return data


def fit_rows(data: Data, start: int, config: PretrainedConfig) -> Data:
    """Double the length of the rows until a quarter of each lies past `start`, the first position
    that is measured, and cut it to the positions that the model has."""
    length = data.length
    while 3 * length < 4 * start:
        length *= 2
    return data.model_copy(update={"length": min(length, position_count(config) or length)})


def check_length(data: Data, start: int) -> None:
    """Raise `RotationZooError` for texts that end before `start`, the first position that is
    measured, and `UsageError` for fewer tokens than one text."""
    if data.length < start + 2:
        raise RotationZooError(
            f"texts of {data.length} tokens are too short: "
            f"the first that reads a quantized one is at position {start}",
            hint="give longer rows with --length, or smaller ones with --windows",
        )
    # With fewer tokens than one row there is no row at all. Only with `document` packing is every
    # document a row, whatever its length.
    if data.packing != "document" and not data.row_lengths:
        raise UsageError(
            f"{counted(data.tokens, 'token')} cannot fill one text of {data.length:,}",
            hint="more --tokens, or a shorter --length",
        )
