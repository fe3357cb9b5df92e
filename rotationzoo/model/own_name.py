"""How commands name the model that an artifact was made for."""

from contextlib import suppress
from pathlib import Path

from rotationzoo.artifact.manifest import Model, hash_config
from rotationzoo.artifact.store import Artifact
from rotationzoo.errors import RotationZooError
from rotationzoo.model.source import DEMO
from rotationzoo.storage import files, folders

_FAILURES = RotationZooError, OSError, RuntimeError, ValueError


def model_words(artifact: Artifact) -> list[str]:
    """The artifact's model as the words of a command: its name and, for a model from the hub, its
    revision. A local model that is not found becomes `MODEL`: an artifact stores no paths."""
    model = artifact.manifest.model
    if model.revision:
        return [model.id, "--revision", model.revision]
    return [_find(model)[0]]


def find_model(artifact: Artifact) -> Path | None:
    """The path of the artifact's model, if it is the demo or is found: in the working folder under
    its own name, or where it was when rotations were made for it."""
    return _find(artifact.manifest.model)[1]


def remember_model(model: Model, path: str) -> None:
    """Remember where a model on this machine lies, as well as the disk allows."""
    with suppress(*_FAILURES):
        if (given := Path.cwd() / Path(path).expanduser()).exists():
            folders.replace_file(_place(model), str(given).encode())


def _find(model: Model) -> tuple[str, Path | None]:
    """Its name in commands, as the user gave it where that still leads to it, and its path."""
    here, paths = Path.cwd(), [Path(model.id)]
    with suppress(*_FAILURES):
        paths.append(Path(files.read(_place(model), 1 << 14).decode()))
    for path in paths:
        folder = DEMO if str(path) == "demo" else here / path
        with suppress(*_FAILURES):  # a folder without a config is another thing of that name
            is_gguf = folder.is_file() and folder.name == model.id
            if is_gguf or hash_config(folder) == model.config_sha256:
                return str(path.relative_to(here) if path.is_relative_to(here) else path), folder
    return "MODEL", None


def _place(model: Model) -> Path:
    known = model.weights_fingerprint or model.config_sha256
    return folders.state_folder() / "models" / known
