"""An evaluation under torchrun or accelerate launch: what its processes cannot share, and that all
of them do the same one."""

from collections.abc import Sequence

from rotationzoo import ranks
from rotationzoo.artifact.store import Artifact
from rotationzoo.artifact.writer import library_versions
from rotationzoo.errors import RotationZooError, UsageError
from rotationzoo.model.source import Source, weights_fingerprint
from rotationzoo.words import differing


def check_shareable(harness: object, device_map: str | None) -> None:
    """Raise `UsageError` for an evaluation that one process has to do alone: one with tasks of
    lm-evaluation-harness, or with a device map."""
    if harness is not None:
        alone = "--harness asks tasks that"
    elif device_map is not None:
        alone = "--device-map spreads one model over all devices, which"
    else:
        return
    raise UsageError(
        f"{alone} processes cannot share", hint="start it without torchrun or accelerate launch"
    )


def identify(settings: object, source: Source, artifacts: Sequence[Artifact]) -> dict[str, str]:
    """What decides the results, by name. `settings`: all of them, as they are printed."""
    versions = [f"{name} {version}" for name, version in library_versions().items()]
    return {
        "settings": repr(settings),
        "weights": weights_fingerprint(source),
        "artifacts": " ".join(artifact.identity for artifact in artifacts),
        "versions": ", ".join(versions),
    }


def check_same(settings: object, source: Source, artifacts: Sequence[Artifact]) -> None:
    """Tell the other processes what this one evaluates, if it is process 0; otherwise wait for
    that, and raise `RotationZooError` if this process evaluates something else."""
    if ranks.world() == 1:
        return
    present = identify(settings, source, artifacts)
    ranks.tell("job", present)
    first = ranks.listen("job") or present
    changed = [name for name in present if present[name] != first.get(name)]
    if changed:
        raise RotationZooError(
            f"process {ranks.rank()} would add results of another evaluation: {differing(changed)}",
            hint="give every machine the same command, files and versions",
        )
