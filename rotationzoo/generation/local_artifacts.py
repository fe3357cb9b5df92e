"""The artifact of a model among those that `calibrate` has put into a folder."""

import shlex
from pathlib import Path

from rotationzoo.artifact.manifest import ROTATIONS
from rotationzoo.artifact.store import Artifact
from rotationzoo.errors import RotationZooError, UsageError
from rotationzoo.model.source import Source, config_hash


def newest_artifact(folder: Path, source: Source) -> tuple[Artifact, int]:
    """The newest of the artifacts in `folder` that were made for this model, and how many there
    are. Damaged ones are left out. Raises `UsageError`, with the command that makes one, where
    there is none."""
    fitting = [each for each in _artifacts(folder) if _is_for(each, source)]
    if not fitting:
        words = shlex.quote(source.name)
        hint = f"make one with: rotationzoo calibrate {words}"
        if source.revision is not None:  # a model of a hub, for which the zoo may have rotations
            hint = f"pull one of the zoo by adding: --rotations {words}; or {hint}"
        raise UsageError(
            f"there are no rotations of {source.name} in the folder {folder}", hint=hint
        )
    # The rotations, and not the manifest, which `evaluate --save` writes again.
    newest = max(fitting, key=lambda each: (each.folder / ROTATIONS).stat().st_mtime_ns)
    return newest, len(fitting)


def _artifacts(folder: Path) -> list[Artifact]:
    artifacts = []
    for manifest in sorted(folder.glob("*/manifest.json")):
        try:
            artifacts.append(Artifact.open(manifest.parent))
        except RotationZooError:
            continue
    return artifacts


def _is_for(artifact: Artifact, source: Source) -> bool:
    return artifact.manifest.model.config_sha256 == config_hash(source)
