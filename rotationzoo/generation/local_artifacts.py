"""The artifact of a model among those that this user has put into a folder."""

import shlex
from contextlib import suppress
from pathlib import Path

from rotationzoo.artifact.manifest import ROTATIONS
from rotationzoo.artifact.store import Artifact
from rotationzoo.errors import RotationZooError, UsageError
from rotationzoo.model.source import Source, config_hash
from rotationzoo.writer import is_remembered


def newest_artifact(folder: Path, source: Source) -> tuple[Artifact, int]:
    """The newest of the artifacts in `folder` that this user made or pulled for this model, and how
    many there are.

    Damaged ones are left out, and those that came into the folder in other ways: an archive or a
    repository may hold a folder of this name. Raises `UsageError`, with the next command, where
    none is left.
    """
    fitting = _artifacts(folder, source)
    trusted = [each for each in fitting if is_remembered(each)]
    if trusted:
        # The rotations, and not the manifest, which `evaluate --save` writes again.
        newest = max(trusted, key=lambda each: (each.folder / ROTATIONS).stat().st_mtime_ns)
        return newest, len(trusted)
    words = shlex.quote(source.name)
    if fitting:
        place = fitting[0].folder
        raise UsageError(
            f"{place} is nothing that you calibrated or pulled on this machine",
            hint=f"if you know whose it is, add: --rotations {shlex.quote(str(place))}",
        )
    hint = f"make one with: rotationzoo calibrate {words}"
    if source.revision is not None:  # a model of a hub, for which the zoo may have rotations
        hint = f"pull one of the zoo by adding: --rotations {words}; or {hint}"
    raise UsageError(f"there are no rotations of {source.name} in the folder {folder}", hint=hint)


def _artifacts(folder: Path, source: Source) -> list[Artifact]:
    """The artifacts of a model in a folder, except damaged ones."""
    artifacts, expected = [], config_hash(source)
    for manifest in sorted(folder.glob("*/manifest.json")):
        with suppress(RotationZooError):
            artifact = Artifact.open(manifest.parent)
            if artifact.manifest.model.config_sha256 == expected:
                artifacts.append(artifact)
    return artifacts
