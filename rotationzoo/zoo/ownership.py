"""Checks that an artifact belongs to the model that an index lists it for: the manifest names the
model, and the model's config is the one in the manifest."""

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
"""Field of an entry -> its name in an error message, and its value in an artifact."""
_OWNERS_HINT = "tell the owners of the repository; to see other rotations: rotationzoo list"
_OTHER_NAME_HINT = "rename the model's folder, and calibrate it again"


def listed_name(model: Model) -> str:
    """The name of a model in an index: its hub id, `demo`, or the name of its local folder. Raises
    `RotationZooError` for an invalid id, and for another model called `demo`."""
    if model.revision is not None:
        if not re.fullmatch(REPOSITORY, model.id):
            problem = f"{model.id!r} is not the name of a model on a hub"
            raise RotationZooError(problem, "calibrate the model again")
        return model.id
    name = re.sub(r"[^\w.-]", "-", Path(model.id).name) or "model"
    if name.lower() != DEMO_NAME:
        return name
    demo = Source(DEMO_NAME, DEMO, None)
    same_config = model.config_sha256 == hash_config(demo.folder)
    if not same_config or model.weights_fingerprint not in (None, weights_fingerprint(demo)):
        problem = f"{name} is listed as the model that comes with rotationzoo, and this is another"
        raise RotationZooError(problem, _OTHER_NAME_HINT)
    return name


def describe(artifact: Artifact) -> dict[str, Any]:
    """The fields of an entry about an artifact's model and recipe."""
    return {name: get(artifact) for name, (_, get) in _FIELDS.items()}


def check_entry(entry: Entry, artifact: Artifact, what: str) -> None:
    """Raise `RotationZooError` if an artifact, called `what`, contradicts its entry."""
    name, problem = listed_name(artifact.manifest.model), f"{what} is listed for {entry.model}"
    if name != entry.model:
        made_for = f"and its manifest says that it was made for {name}"
        raise RotationZooError(f"{problem}, {made_for}", _OWNERS_HINT)
    for field, (description, get) in _FIELDS.items():
        listed = getattr(entry, field)
        if listed is not None and listed != get(artifact):
            other = f"with another {description} than its manifest has"
            raise RotationZooError(f"{problem} {other}", _OWNERS_HINT)


def not_published(artifact: Artifact, reason: str, hint: str | None) -> RotationZooError:
    """The error for an artifact that must not be published."""
    return RotationZooError(f"{artifact.folder} is not published: {reason}", hint)


def check_model(artifact: Artifact) -> None:
    """Raise `RotationZooError` if the model at the manifest's revision has another config or cannot
    be read. Models in local folders are not checked."""
    model = artifact.manifest.model
    if model.revision is None:
        return
    try:
        source = find(model.id, model.revision)
    except ModelUnavailable as error:
        reason = f"the config of {model.id} cannot be checked: {error}"
        raise not_published(artifact, reason, error.hint) from error
    if hash_config(source.folder) != model.config_sha256:
        other = f"{model.id} has another config at revision {model.revision}"
        hint = f"make one with: rotationzoo calibrate {model.id}"
        raise not_published(artifact, f"{other} than the model that it was made for", hint)


def check_unclaimed(content: Index, entry: Entry, repo: str) -> None:
    """Raise `RotationZooError` if a zoo lists another local model, which has the same name."""
    for listed in content.entries if "/" not in entry.model else ():
        is_same_name = listed.model.lower() == entry.model.lower()
        if is_same_name and listed.config_sha256 != entry.config_sha256:
            problem = f"{repo} already lists another model as {listed.model}"
            raise RotationZooError(problem, _OTHER_NAME_HINT)
