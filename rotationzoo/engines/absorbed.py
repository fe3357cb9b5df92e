"""Checks that a model's folder carries the part of an artifact that an export leaves to it."""

import shlex
from pathlib import Path

from rotationzoo.artifact.store import Artifact
from rotationzoo.artifact.weights import EQUALIZER, RECORD, VALUE_ROTATION, read_record
from rotationzoo.errors import RotationZooError

_FLAGS = {VALUE_ROTATION: "--absorb-values", EQUALIZER: "--absorb"}


def check_carries(artifact: Artifact, folder: Path, absorbed: str) -> str:
    """The absolute path of a model whose weights carry the value rotation or the equalizer.

    Raises `RotationZooError` unless its record says so and names this very artifact.
    """
    record = read_record(folder)
    if record is None or record.absorbed != absorbed:
        carries = f"its {RECORD} says {record.absorbed}" if record else f"it has no {RECORD}"
        raise RotationZooError(
            f"the weights of {folder} do not carry the {absorbed} of an artifact: {carries}",
            hint=f"make such a copy with: {write_command(artifact, absorbed)}",
        )
    if record.artifact != artifact.identity:
        raise RotationZooError(
            f"{folder} carries the {absorbed} of another artifact", hint="export that one"
        )
    return str(folder.absolute())


def write_command(artifact: Artifact, absorbed: str) -> str:
    """The command that writes such a copy of the artifact's model."""
    folder = shlex.quote(str(artifact.folder))
    return f"rotationzoo export {folder} {_FLAGS[absorbed]} MODEL"
