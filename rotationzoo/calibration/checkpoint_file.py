"""Reads one file of a checkpoint: tensors, and metadata that says which job they belong to."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from rotationzoo.calibration.identity import Identity, differences
from rotationzoo.errors import RotationZooError
from rotationzoo.storage import strict_json
from rotationzoo.storage.files import size_of
from rotationzoo.words import differing


def read_field(
    path: Path, identity: Identity, field: str, kind: Any, parts: Sequence[str] | None = None
) -> Any:
    """One `field` of a file's metadata, validated as `kind`, which decides whether the field may be
    missing (None). None also if there is no file.

    `parts` are the keys of the job's `identity` that must agree; None means all of them. Raises
    `RotationZooError` if they do not, or if the file is damaged.
    """
    if size_of(path) is None:
        return None
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        saved = strict_json.parse(metadata["identity"], str(path))
        content = strict_json.parse(metadata.get(field, "null"), str(path))
        strict_json.validate(dict[str, str], saved, str(path))
        strict_json.validate(kind, content, str(path))
    # A damaged file can fail in any of these ways.
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        SafetensorError,
        RotationZooError,
    ) as error:
        raise damaged(path) from error
    if changed := differences(saved, identity, parts):
        raise RotationZooError(
            f"the checkpoint {path} is of another job: {differing(changed)}",
            hint="start afresh with --restart, or choose another --output",
        )
    return content


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file. Raises `RotationZooError` if it is damaged."""
    try:
        return load_file(path)
    except (OSError, ValueError, SafetensorError) as error:
        raise damaged(path) from error


def damaged(path: Path) -> RotationZooError:
    """The error of a file whose content is not what `Checkpoint` wrote."""
    return RotationZooError(f"the checkpoint {path} is damaged", hint="start afresh with --restart")
