"""The record that a copy of a model has of itself, where its weights carry the value rotation of an
artifact."""

import os
from contextlib import suppress
from pathlib import Path

from rotationzoo import __version__
from rotationzoo.artifact.manifest import hash_config
from rotationzoo.artifact.store import Artifact
from rotationzoo.errors import RotationZooError
from rotationzoo.model.source import DEMO, Source, weights_fingerprint
from rotationzoo.storage import strict_json

RECORD = "rotationzoo.json"


class Record(strict_json.Strict):
    """The part of a copy's record that commands read."""

    artifact: str
    """The identity of the artifact that the value rotation is from."""


def record_text(artifact: Artifact, published: Source, copy: Source) -> bytes:
    """The record of a copy of a model that carries an artifact's rotation."""
    record = {
        "rotationzoo": __version__,
        "absorbed": "value rotation",
        "artifact": artifact.identity,
        "model": artifact.content["model"],
        "published_weights": weights_fingerprint(published),
        "weights": weights_fingerprint(copy),
    }
    return strict_json.text(record)


def read_record(folder: Path) -> Record | None:
    """The record in a model's folder, or None if its weights are as published. Raises
    `RotationZooError` for a damaged record."""
    path = folder / RECORD
    if not path.is_file():
        return None
    # The file may be a link, as in the hub's cache.
    content = strict_json.read(Path(os.path.realpath(path)))
    return strict_json.validate(Record, content, str(path))


def model_words(artifact: Artifact) -> list[str]:
    """The artifact's model as the words of a command: its name and, for a model from the hub, its
    revision. A local model that is not here becomes `MODEL`: an artifact stores no paths."""
    model = artifact.manifest.model
    if model.revision:
        return [model.id, "--revision", model.revision]
    return ["MODEL" if find_model(artifact) is None else model.id]


def find_model(artifact: Artifact) -> Path | None:
    """The folder of the artifact's model, if it is the demo or lies in the working folder under its
    own name."""
    model = artifact.manifest.model
    folder = DEMO if model.id == "demo" else Path(model.id)
    with suppress(RotationZooError):  # a folder without a config is another thing of that name
        if hash_config(folder) == model.config_sha256:
            return folder.absolute()
    return None
