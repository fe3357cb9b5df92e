"""Whose an artifact is: the model that its manifest names, held against an index's entry and
against the model itself."""

import re
from pathlib import Path

from rotationzoo.artifact.manifest import Model
from rotationzoo.artifact.store import Artifact
from rotationzoo.errors import ModelUnavailable, RotationZooError
from rotationzoo.model.source import DEMO, Source, config_hash, find, weights_fingerprint
from rotationzoo.zoo.index import REPOSITORY, Entry, Index

DEMO_NAME = "demo"
_DESCRIBED = {
    "model_revision": "revision", "config_sha256": "config hash", "weights_fingerprint": "weights", "recipe": "recipe",
    "recipe_sha256": "recipe's hash", "geometry": "geometry",
}  # fmt: skip


def listed_name(model: Model) -> str:
    """What an index calls a manifest's `model`: its hub id, `demo`, or for a local folder its own
    name, which has no owner.

    Raises `RotationZooError` for a name that is not the model's own.
    """
    given = model.id
    if model.revision is not None:
        if not re.fullmatch(REPOSITORY, given):
            raise RotationZooError(
                f"{given!r} is no name of a model on a hub", hint="calibrate the model again"
            )
        return given
    name = re.sub(r"[^\w.-]", "-", Path(given).name) or "model"
    if name.lower() == DEMO_NAME:
        demo = Source(DEMO_NAME, DEMO, None)
        known = {
            "config_sha256": config_hash(demo),
            "weights_fingerprint": weights_fingerprint(demo),
        }
        if any(getattr(model, key) not in (value, None) for key, value in known.items()):
            raise RotationZooError(
                f"a folder called {name} is listed as the model that comes with rotationzoo, which it is not",
                hint="give the model's folder a name of its own, and calibrate it again",
            )
    return name


def check_entry(entry: Entry, artifact: Artifact, what: str) -> None:
    """Raise `RotationZooError` where a manifest is of another model, revision or recipe than the
    entry that lists it."""
    manifest = artifact.manifest
    model = manifest.model
    name = listed_name(model)
    if name != entry.model:
        raise RotationZooError(
            f"{what} is listed for {entry.model}, and its manifest says that it was made for {name}",
            hint="tell the owners of the repository; to look at what else there is: rotationzoo list",
        )
    says = {
        "model_revision": model.revision, "recipe": artifact.recipe.name, "geometry": artifact.content["geometry"],
        "recipe_sha256": manifest.recipe_sha256,
    } | {key: getattr(model, key) for key in ("config_sha256", "weights_fingerprint")}  # fmt: skip
    for key, described in _DESCRIBED.items():
        listed = getattr(entry, key)
        if listed is not None and listed != says[key]:
            raise RotationZooError(
                f"{what} is listed for {entry.model} with another {described} than its manifest has",
                hint="tell the owners of the repository; to look at what else there is: rotationzoo list",
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
            f"{artifact.folder} is not published: whether it was made for {model.id} cannot be seen, as {error}",
            hint=error.hint,
        ) from error
    if config_hash(source) != model.config_sha256:
        raise RotationZooError(
            f"{artifact.folder} is not published: {model.id} has another config at revision {model.revision} than the "
            f"model that it was made for",
            hint=f"make one with: rotationzoo calibrate {model.id}",
        )


def check_unclaimed(content: Index, entry: Entry, repo: str) -> None:
    """Raise `RotationZooError` where a zoo lists another model under the name of a local one, which
    is nobody's own."""
    for other in content.entries:
        same = other.model.lower() == entry.model.lower() and "/" not in entry.model
        if same and other.config_sha256 != entry.config_sha256:
            raise RotationZooError(
                f"{repo} lists another model as {other.model} already",
                hint="give the model's folder a name of its own, and calibrate it again",
            )
