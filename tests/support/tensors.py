"""The tensors in an artifact's files, as they are stored. They are copies, so that a test may write
to the files."""

import torch
from safetensors.torch import load

from rotationzoo.artifact.manifest import ROTATIONS, STATISTICS
from rotationzoo.artifact.store import Artifact


def stored_rotations(artifact: Artifact) -> dict[str, torch.Tensor]:
    """The rotations by name."""
    return load((artifact.folder / ROTATIONS).read_bytes())


def stored_statistics(artifact: Artifact) -> dict[str, torch.Tensor]:
    """The statistics by name."""
    return load((artifact.folder / STATISTICS).read_bytes())
