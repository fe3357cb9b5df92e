"""The artifact that a text is written with: opened, pulled by its name, or found among
this user's."""

import shlex
from contextlib import suppress
from pathlib import Path

from rotationzoo.artifact.manifest import ROTATIONS, hash_config
from rotationzoo.artifact.store import Artifact
from rotationzoo.errors import HubError, RotationZooError, UsageError
from rotationzoo.model.source import Source
from rotationzoo.writer import is_remembered
from rotationzoo.zoo.pull import pull


def newest_artifact(folder: Path, source: Source) -> tuple[Artifact, int]:
    """The newest of the artifacts in `folder` that this user made or pulled for this model, and how
    many there are.

    Damaged ones are left out, and those that came into the folder in other ways: an archive or a
    repository may hold a folder of this name. Raises `UsageError`, with the next command, where
    none is left.
    """
    fitting, expected = [], hash_config(source.folder)
    for manifest in sorted(folder.glob("*/manifest.json")):
        with suppress(RotationZooError):
            artifact = Artifact.open(manifest.parent)
            if artifact.manifest.model.config_sha256 == expected:
                fitting.append(artifact)
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


def open_artifact(given: str | Path) -> Artifact:
    """The artifact in a folder, or that of a name in the zoo, which is pulled. Raises
    `RotationZooError` where there is none."""
    if _is_path(given):
        return Artifact.open(Path(given).expanduser())
    try:
        return pull(str(given))
    except HubError as error:
        raise HubError(
            f"{given} is no folder, and pulling it from the zoo fails: {error}",
            hint="check the spelling and the network, or give a folder",
        ) from error


def _is_path(given: str | Path) -> bool:
    """Whether this names a folder of this machine, even one that is missing, and not an entry of
    the zoo: a user who mistypes a folder should not be told about a hub."""
    path = Path(given).expanduser()
    if path.exists() or path.is_absolute() or isinstance(given, Path) or given.startswith("."):
        return True
    # Where `calibrate` puts artifacts, or has put others.
    in_rotations = path.parts[:1] == ("rotations",)
    return len(path.parts) > 1 and (in_rotations or any(path.parent.glob("*/manifest.json")))
