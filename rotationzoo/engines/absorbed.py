"""The record in a model's folder that says which artifact's value rotation it has absorbed."""

import json
import shlex
from pathlib import Path

from rotationzoo import __version__
from rotationzoo.artifact.store import Artifact
from rotationzoo.errors import RotationZooError
from rotationzoo.storage import strict_json
from rotationzoo.storage.files import size_of

RECORD = "rotationzoo.json"


def record_text(artifact: Artifact) -> str:
    """The content of the record: the artifact's identity and the model that it was made for."""
    record = {
        "rotationzoo": __version__,
        "absorbed": "value rotation",
        "artifact": artifact.identity,
        "model": artifact.content["model"],
    }
    return json.dumps(record, indent=2) + "\n"


def check_absorbed_model(artifact: Artifact, folder: Path) -> str:
    """The absolute path of a model with an absorbed value rotation.

    Raises `RotationZooError` unless its record names this very artifact.
    """
    if size_of(folder / RECORD) is None:
        export = f"rotationzoo export {shlex.quote(str(artifact.folder))}"
        raise RotationZooError(
            f"{folder} is no model with an absorbed value rotation: it has no {RECORD}",
            hint=f"make one with: {export} --absorb-values MODEL",
        )
    record = strict_json.read(folder / RECORD)
    if not isinstance(record, dict) or record.get("artifact") != artifact.identity:
        raise RotationZooError(
            f"{folder} carries the value rotation of another artifact", hint="export that one"
        )
    return str(folder.absolute())
