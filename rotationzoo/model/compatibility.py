"""Whether an artifact fits a model: its shapes, RoPE scaling and weights."""

import logging
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from rotationzoo.artifact.manifest import hash_config
from rotationzoo.artifact.store import Artifact
from rotationzoo.errors import RotationZooError, UsageError
from rotationzoo.geometry import Geometry, cached_rows, check_group_size, head_dims, same_shapes
from rotationzoo.model.geometry import geometry_of
from rotationzoo.model.loading import load_config
from rotationzoo.model.source import Source, find_cached, has_weights, weights_fingerprint
from rotationzoo.recipe.rope import same_scaling, scaling_of
from rotationzoo.recipe.schema import normalize

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LOG = logging.getLogger(__name__)


def check_artifacts(model: str, artifacts: list[Artifact], geometry: Geometry) -> None:
    """Raise `RotationZooError` for damage, other shapes, or a group size that does not fit."""
    hint = f"make one with: rotationzoo calibrate {shlex.quote(model)}"
    for artifact in artifacts:
        made_for, cached = cached_rows(artifact.geometry), cached_rows(geometry)
        if made_for != cached:
            held = f"{artifact.folder} holds rotations of {made_for.name}"
            raise RotationZooError(f"{held}, and {model} caches {cached.name}", hint)
        if not same_shapes(artifact.geometry, geometry):
            other = f"other layers, heads or dimensions than {model}: {artifact.manifest.model.id}"
            raise RotationZooError(f"{artifact.folder} was made for a model of {other}", hint)
        check_group_size(artifact.recipe.group_size, head_dims(geometry))
        _ = artifact.rotations  # read now, because weights may take hours to fetch


def settle_rope_scaling(asked: str | None, artifacts: list[Artifact], source: Source) -> str | None:
    """The RoPE scaling to run with: `asked`, or that of the artifacts. Raises `UsageError` if it is
    malformed, and `RotationZooError` if they differ for this model."""
    try:
        scaling = None if asked is None else normalize(asked)
    except ValueError as error:
        raise UsageError(f"--rope-scaling {error}", hint="--rope-scaling yarn:4") from error
    for artifact in artifacts:
        calibrated = artifact.recipe.rope_scaling
        scaling = scaling or calibrated
        if calibrated is None or scaling is None or calibrated == scaling:
            continue
        made, runs = (scaling_of(load_config(source, each)) for each in (calibrated, scaling))
        if made != runs:
            problem = f"was calibrated with the rope scaling {calibrated}, not {scaling}"
            others = f"give it alone, or with artifacts of --rope-scaling {calibrated}"
            hint = others if asked is None else "leave --rope-scaling out, or name others"
            raise RotationZooError(f"{artifact.folder} {problem}", hint)
    return scaling


def rope_notes(artifacts: list[Artifact], scaling: str | None) -> list[str]:
    """Notes on the model's RoPE scaling, and on artifacts calibrated without it."""
    if scaling is None:
        return []
    plain = [each.folder.resolve().name for each in artifacts if each.recipe.rope_scaling is None]
    notes = [f"{name} was calibrated without that scaling" for name in plain]
    return [f"the model's RoPE is scaled by {scaling}", *notes]


def check_weights(artifacts: list[Artifact], source: Source, anyway: bool) -> None:
    """Raise `RotationZooError` for artifacts that are not of these weights, unless `anyway`."""
    for artifact in () if anyway else artifacts:
        if note := other_weights_note(artifact, source):
            make = f"make one with: rotationzoo calibrate {shlex.quote(source.name)}"
            raise RotationZooError(note, hint=f"{make}; or add --anyway")


def other_weights_note(artifact: Artifact, source: Source) -> str | None:
    """A note for an artifact that was made for another config or other weights, or None."""
    model = artifact.manifest.model
    fingerprint = model.weights_fingerprint  # None for some imported files
    same_config = model.config_sha256 == hash_config(source.folder)
    if same_config and (fingerprint is None or fingerprint == weights_fingerprint(source)):
        return None
    return f"{artifact.folder.resolve().name} was made for other weights than {source.name} has"


def check_fits(artifact: Artifact, model: "PreTrainedModel") -> None:
    """Raise `RotationZooError` for an artifact of another model or RoPE scaling."""
    check_artifacts(model.name_or_path or type(model).__name__, [artifact], geometry_of(model))
    wanted, present = artifact.recipe.rope_scaling, scaling_of(model.config)
    if not same_scaling(wanted, present):
        runs = f"and this model runs {f'with {present}' if present else 'without'}"
        hint = "load the model with the same scaling in the rope_parameters of its config"
        problem = f"{artifact.folder} was calibrated with the rope scaling {wanted}, {runs}"
        raise RotationZooError(problem, hint)


def warn_of_other_weights(artifact: Artifact, model: "PreTrainedModel") -> None:
    """Log a warning if an artifact was made for other weights than the model's files."""
    name, commit = model.name_or_path or "", getattr(model.config, "_commit_hash", None)
    source = find_cached(name, commit) if commit else None
    if name and Path(name).is_dir():
        source = Source(name, Path(name), None)
    if source is None or not has_weights(source):
        return
    if note := other_weights_note(artifact, source):
        _LOG.warning("%s; see: rotationzoo verify", note)
