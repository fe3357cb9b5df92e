"""Whose an artifact is: the model that its manifest names must be the one that an index lists, and
the one that has this config."""

import re
from pathlib import Path

from rotationzoo.artifact.manifest import Model
from rotationzoo.artifact.store import Artifact
from rotationzoo.errors import ModelUnavailable, RotationZooError
from rotationzoo.model.source import DEMO, Source, config_hash, find, weights_fingerprint
from rotationzoo.zoo.index import REPOSITORY, Entry, Index

DEMO_NAME = "demo"
_DESCRIPTIONS = {
    "model_revision": "revision",
    "config_sha256": "config hash",
    "weights_fingerprint": "weights",
    "recipe": "recipe",
    "recipe_sha256": "recipe's hash",
    "geometry": "geometry",
}
"""Field of an entry -> what it is called in a sentence."""
_OWNERS_HINT = "tell the owners of the repository; to look at what else there is: rotationzoo list"
_OTHER_NAME_HINT = "give the model's folder a name of its own, and calibrate it again"


def listed_name(model: Model) -> str:
    """What an index calls a manifest's `model`: its hub id, `demo`, or for a local folder the
    folder's name, which has no owner.

    Raises `RotationZooError` for a name that is not the model's own.
    """
    if model.revision is not None:
        if not re.fullmatch(REPOSITORY, model.id):
            raise RotationZooError(
                f"{model.id!r} is no name of a model on a hub", hint="calibrate the model again"
            )
        return model.id
    name = re.sub(r"[^\w.-]", "-", Path(model.id).name) or "model"
    if name.lower() == DEMO_NAME and not _is_demo(model):
        raise RotationZooError(
            f"a folder called {name} is listed as the model that comes with rotationzoo, which it "
            "is not",
            hint=_OTHER_NAME_HINT,
        )
    return name


def _is_demo(model: Model) -> bool:
    """Whether a manifest's model is the one that comes with this package, as far as it says."""
    demo = Source(DEMO_NAME, DEMO, None)
    return model.config_sha256 in (config_hash(demo), None) and model.weights_fingerprint in (
        weights_fingerprint(demo),
        None,
    )


def check_entry(entry: Entry, artifact: Artifact, what: str) -> None:
    """Raise `RotationZooError` where a manifest is of another model, revision or recipe than the
    entry that lists it. `what` names the artifact in the sentence."""
    manifest = artifact.manifest
    name = listed_name(manifest.model)
    if name != entry.model:
        raise RotationZooError(
            f"{what} is listed for {entry.model}, and its manifest says that it was made for "
            f"{name}",
            hint=_OWNERS_HINT,
        )
    described = {
        "model_revision": manifest.model.revision,
        "config_sha256": manifest.model.config_sha256,
        "weights_fingerprint": manifest.model.weights_fingerprint,
        "recipe": artifact.recipe.name,
        "recipe_sha256": manifest.recipe_sha256,
        "geometry": artifact.content["geometry"],
    }
    for key, description in _DESCRIPTIONS.items():
        listed = getattr(entry, key)
        if listed is not None and listed != described[key]:
            raise RotationZooError(
                f"{what} is listed for {entry.model} with another {description} than its manifest "
                "has",
                hint=_OWNERS_HINT,
            )


def check_model(artifact: Artifact) -> None:
    """Raise `RotationZooError` unless the model that a manifest names has, at that revision, the
    config of the manifest."""
    model = artifact.manifest.model
    if model.revision is None:
        return
    try:
        source = find(model.id, model.revision)
    except ModelUnavailable as error:
        raise RotationZooError(
            f"{artifact.folder} is not published: whether it was made for {model.id} cannot be "
            f"seen, as {error}",
            hint=error.hint,
        ) from error
    if config_hash(source) != model.config_sha256:
        raise RotationZooError(
            f"{artifact.folder} is not published: {model.id} has another config at revision "
            f"{model.revision} than the model that it was made for",
            hint=f"make one with: rotationzoo calibrate {model.id}",
        )


def check_unclaimed(content: Index, entry: Entry, repo: str) -> None:
    """Raise `RotationZooError` where a zoo lists another model under the name of a local one, which
    nobody owns."""
    if "/" in entry.model:
        return
    for listed in content.entries:
        is_same_name = listed.model.lower() == entry.model.lower()
        if is_same_name and listed.config_sha256 != entry.config_sha256:
            raise RotationZooError(
                f"{repo} lists another model as {listed.model} already", hint=_OTHER_NAME_HINT
            )
