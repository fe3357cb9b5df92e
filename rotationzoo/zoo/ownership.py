"""Checks that an artifact belongs to the model that an index lists it for: the manifest names that
model, and the model has the config that the manifest records."""

import re
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

from rotationzoo.artifact.manifest import Model, hash_config
from rotationzoo.artifact.store import Artifact
from rotationzoo.errors import ModelUnavailable, RotationZooError
from rotationzoo.model.source import DEMO, Source, find, weights_fingerprint
from rotationzoo.zoo.index import REPOSITORY, Entry, Index

DEMO_NAME = "demo"
_FIELDS: dict[str, tuple[str, Callable[[Artifact], Any]]] = {
    "model_revision": ("revision", attrgetter("manifest.model.revision")),
    "config_sha256": ("config hash", attrgetter("manifest.model.config_sha256")),
    "weights_fingerprint": ("weights", attrgetter("manifest.model.weights_fingerprint")),
    "recipe": ("recipe", attrgetter("recipe.name")),
    "recipe_sha256": ("recipe's hash", attrgetter("manifest.recipe_sha256")),
    "rope_scaling": ("rope scaling", attrgetter("recipe.rope_scaling")),
    "geometry": ("geometry", lambda artifact: artifact.content["geometry"]),
}
"""Field of an entry -> its name in an error message, and what it is in an artifact."""
_OWNERS_HINT = "tell the owners of the repository; to look at what else there is: rotationzoo list"
_OTHER_NAME_HINT = "give the model's folder a name of its own, and calibrate it again"


def folder_name(label: str) -> str:
    """The name under which an index lists the model of a local folder with this name."""
    return re.sub(r"[^\w.-]", "-", label) or "model"


def listed_name(model: Model) -> str:
    """The name under which an index lists a manifest's `model`: its hub id, `demo`, or the name of
    a local folder. Raises `RotationZooError` for an invalid hub id, and for another model in a
    folder called `demo`."""
    if model.revision is not None:
        if not re.fullmatch(REPOSITORY, model.id):
            hint = "calibrate the model again"
            raise RotationZooError(f"{model.id!r} is not the name of a model on a hub", hint)
        return model.id
    name = folder_name(Path(model.id).name)
    if name.lower() != DEMO_NAME:
        return name
    demo = Source(DEMO_NAME, DEMO, None)
    same_config = model.config_sha256 == hash_config(demo.folder)
    if not same_config or model.weights_fingerprint not in (None, weights_fingerprint(demo)):
        raise RotationZooError(
            f"a folder called {name} is listed as the model that comes with rotationzoo, which it "
            "is not",
            hint=_OTHER_NAME_HINT,
        )
    return name


def describe(artifact: Artifact) -> dict[str, Any]:
    """What an entry says of an artifact's model and recipe, by field."""
    return {name: get(artifact) for name, (_, get) in _FIELDS.items()}


def check_entry(entry: Entry, artifact: Artifact, what: str) -> None:
    """Raise `RotationZooError` if an artifact, called `what`, contradicts its entry."""
    name, stands = listed_name(artifact.manifest.model), f"{what} is listed for {entry.model}"
    if name != entry.model:
        made_for = f"and its manifest says that it was made for {name}"
        raise RotationZooError(f"{stands}, {made_for}", hint=_OWNERS_HINT)
    for field, (description, get) in _FIELDS.items():
        listed = getattr(entry, field)
        if listed is not None and listed != get(artifact):
            other = f"with another {description} than its manifest has"
            raise RotationZooError(f"{stands} {other}", hint=_OWNERS_HINT)


def not_published(artifact: Artifact, reason: str, hint: str | None) -> RotationZooError:
    """The error for an artifact that is not to be published."""
    return RotationZooError(f"{artifact.folder} is not published: {reason}", hint)


def check_model(artifact: Artifact) -> None:
    """Raise `RotationZooError` if the model at the manifest's revision has another config or cannot
    be read. Models of local folders are not checked."""
    model = artifact.manifest.model
    if model.revision is None:
        return
    try:
        source = find(model.id, model.revision)
    except ModelUnavailable as error:
        reason = f"it cannot be checked that it was made for {model.id}: {error}"
        raise not_published(artifact, reason, error.hint) from error
    if hash_config(source.folder) != model.config_sha256:
        other = f"{model.id} has another config at revision {model.revision}"
        hint = f"make one with: rotationzoo calibrate {model.id}"
        raise not_published(artifact, f"{other} than the model that it was made for", hint)


def check_unclaimed(content: Index, entry: Entry, repo: str) -> None:
    """Raise `RotationZooError` if a zoo already lists another model under this name. The name of a
    local model has no owner, so two models may claim it."""
    if "/" in entry.model:
        return
    for listed in content.entries:
        is_same_name = listed.model.lower() == entry.model.lower()
        if is_same_name and listed.config_sha256 != entry.config_sha256:
            hint = _OTHER_NAME_HINT
            raise RotationZooError(f"{repo} lists another model as {listed.model} already", hint)
