"""The artifact that a cache reads: opened, pulled by its name, or found among this user's,
and compared with the model."""

import logging
import shlex
from contextlib import suppress
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from transformers import PreTrainedModel

from rotationzoo.artifact.manifest import ROTATIONS
from rotationzoo.artifact.store import Artifact
from rotationzoo.errors import HubError, RotationZooError, UsageError
from rotationzoo.evaluation.compatibility import check_artifacts, check_rope, other_weights_note
from rotationzoo.model.geometry import geometry_of
from rotationzoo.model.source import Source, config_hash, has_weights
from rotationzoo.writer import is_remembered
from rotationzoo.zoo.by_name import pull

_LOG = logging.getLogger(__name__)


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


def check_fits(artifact: Artifact, model: PreTrainedModel) -> None:
    """Raise `RotationZooError` for an artifact of another model than what these weights compute."""
    name = model.name_or_path or type(model).__name__
    check_artifacts(name, [artifact], geometry_of(model))
    check_rope(artifact, model.config)


def warn_of_other_weights(artifact: Artifact, model: PreTrainedModel) -> None:
    """Log a warning where the files of a model are not those that an artifact was made for."""
    source = _source_of(model)
    if source is None or not has_weights(source):
        return
    if note := other_weights_note(artifact, source):
        _LOG.warning("%s; see: rotationzoo verify", note)


def _source_of(model: PreTrainedModel) -> Source | None:
    """Where a model was loaded from, or None where this is not known, or not on this machine."""
    name, commit = model.name_or_path or "", getattr(model.config, "_commit_hash", None)
    if name and Path(name).is_dir():
        return Source(name, Path(name), None)
    config = commit and try_to_load_from_cache(name, "config.json", revision=commit)
    return Source(name, Path(config).parent, commit) if isinstance(config, str) else None


def _is_path(given: str | Path) -> bool:
    """Whether this names a folder of this machine, even one that is missing, and not an entry of
    the zoo: a user who mistypes a folder should not be told about a hub."""
    path = Path(given).expanduser()
    if path.exists() or path.is_absolute() or isinstance(given, Path) or given.startswith("."):
        return True
    # Where `calibrate` puts artifacts, or has put others.
    in_rotations = path.parts[:1] == ("rotations",)
    return len(path.parts) > 1 and (in_rotations or any(path.parent.glob("*/manifest.json")))
