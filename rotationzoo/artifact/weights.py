"""Which weights a model's folder holds: the published ones, or a copy into which an artifact's
equalizer is folded.

An equalized artifact fits both. With the published weights the cache applies the equalizer; with
the folded ones, which a record in their folder names, only the rotation is left to apply.
"""

import os
from dataclasses import replace
from pathlib import Path

from rotationzoo import __version__
from rotationzoo.artifact.store import Artifact
from rotationzoo.errors import RotationZooError
from rotationzoo.model.source import DEMO, Source, config_hash, weights_fingerprint
from rotationzoo.rotations import Rotation, Rotations
from rotationzoo.storage import strict_json

RECORD = "rotationzoo.json"
EQUALIZER, VALUE_ROTATION = "equalizer", "value rotation"


class Record(strict_json.Strict):
    """The record that a changed copy of a model has of itself."""

    absorbed: str = VALUE_ROTATION
    """The part that its weights carry: `EQUALIZER` or `VALUE_ROTATION`."""
    artifact: str
    """The identity of the artifact that this is from."""
    weights: str | None = None
    """The fingerprint of the changed weights. Earlier versions did not record it."""


def record_text(artifact: Artifact, absorbed: str, published: Source, copy: Source) -> bytes:
    """The record of a copy of a model that carries a part of an artifact."""
    record = {
        "rotationzoo": __version__,
        "absorbed": absorbed,
        "artifact": artifact.identity,
        "model": artifact.content["model"],
        "published_weights": weights_fingerprint(published),
        "weights": weights_fingerprint(copy),
    }
    return strict_json.text(record)


def read_record(folder: Path) -> Record | None:
    """The record in a model's folder, or None if there is none: its weights are as published.

    Raises `RotationZooError` for a damaged record.
    """
    path = folder / RECORD
    if not path.is_file():
        return None
    # The file may be a link, as in the hub's cache.
    content = strict_json.read(Path(os.path.realpath(path)))
    return strict_json.validate(Record, content, str(path))


def model_words(artifact: Artifact) -> list[str]:
    """The artifact's model as the words of a command: its name and, for a model from the hub, its
    revision. Another local model than the demo becomes `MODEL`: an artifact stores no paths."""
    model = artifact.manifest.model
    if model.revision:
        return [model.id, "--revision", model.revision]
    demo = Source("demo", DEMO, None)
    is_demo = (model.id, model.config_sha256) == (demo.name, config_hash(demo))
    return [demo.name if is_demo else "MODEL"]


def folded_record(artifact: Artifact, source: Source) -> Record | None:
    """The record of a model whose weights carry this artifact's equalizer; None for other models.

    Raises `RotationZooError` for a model that carries the equalizer of another artifact, unless
    this one was made for those very weights: its rotations would fit neither keys nor values.
    """
    record = read_record(source.folder)
    if record is None or record.absorbed != EQUALIZER:
        return None
    if record.artifact == artifact.identity:
        return record
    made_for = artifact.manifest.model.weights_fingerprint
    # Rotations that need no statistics are for any weights.
    if made_for == record.weights or not artifact.recipe.needs_statistics:
        return None
    raise RotationZooError(
        f"the weights of {source.name} carry the equalizer of another artifact than "
        f"{artifact.folder}",
        hint="give the model as it was published, or the artifact that was folded into it",
    )


def rotations_for(artifact: Artifact, source: Source) -> Rotations:
    """The rotations that a cache applies to what these weights compute.

    Raises `RotationZooError` as `folded_record` does.
    """
    if folded_record(artifact, source) is None:
        return artifact.rotations
    return folded_rotations(artifact)


def folded_rotations(artifact: Artifact) -> Rotations:
    """The rotations in the frame of the folded weights: without equalizers, and with means that
    went through them."""
    return artifact.rotations.replace(lambda layer, side, rotation: _folded(rotation))


def _folded(rotation: Rotation) -> Rotation:
    mean = rotation.mean
    if mean is not None:
        mean = rotation.fold(mean[:, None])[:, 0]
    return replace(rotation, mean=mean, equalizer=None)
