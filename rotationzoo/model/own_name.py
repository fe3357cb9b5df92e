"""How commands name the model that an artifact was made for."""

from contextlib import suppress
from pathlib import Path

from rotationzoo.artifact.manifest import hash_config
from rotationzoo.artifact.store import Artifact
from rotationzoo.errors import RotationZooError
from rotationzoo.model.source import DEMO


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
