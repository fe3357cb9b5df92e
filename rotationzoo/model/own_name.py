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
    return [_find_name(model) or "MODEL"]


def find_model(artifact: Artifact) -> Path | None:
    """The absolute path of the artifact's model, if it is the demo or was found on this machine."""
    name = _find_name(artifact.manifest.model)
    return None if name is None else _path(name).absolute()


def remember_model(model: Model, path: str) -> None:
    """Remember where a model on this machine lies, as well as the disk allows."""
    with suppress(*_FAILURES):
        if (given := Path.cwd() / Path(path).expanduser()).exists():
            folders.replace_file(_place(model), str(given).encode())


def _find_name(model: Model) -> str | None:
    """`demo`, the model's own name where it lies in the working folder, or else the path that was
    remembered, from the working folder if it was given so."""
    names = [model.id]
    with suppress(*_FAILURES):
        given, here = Path(files.read(_place(model), 1 << 14).decode()), Path.cwd()
        names.append(str(given.relative_to(here) if given.is_relative_to(here) else given))
    for name in names:
        path = _path(name)
        with suppress(*_FAILURES):  # a folder without a config is another thing of that name
            is_file = path.is_file() and path.name == model.id  # a GGUF file
            if is_file or hash_config(path) == model.config_sha256:
                return name
    return None


def _path(name: str) -> Path:
    return DEMO if name == "demo" else Path(name)


def _place(model: Model) -> Path:
    known = model.weights_fingerprint or model.config_sha256
    return folders.state_folder() / "models" / known
