"""One rotation per layer in place of an artifact's own per KV head, as engines take it that have no
other: fitted from the statistics pooled over heads."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rotationzoo.artifact.store import Artifact
from rotationzoo.calibration.equalizing import fold_statistics, stored_equalizers
from rotationzoo.calibration.fit import fit
from rotationzoo.errors import RotationZooError, UsageError
from rotationzoo.linalg.compositions import GIVEN
from rotationzoo.linalg.moments import sums
from rotationzoo.rotations import Rotation, Rotations


def pooled_name(name: str) -> str:
    """The name of the arm with one rotation per layer, from that of an artifact's own."""
    return f"{name}+pooled"


def check_pooled(artifacts: Sequence[Artifact]) -> None:
    """Raise `UsageError` if no artifact has a rotation per KV head, and `RotationZooError` for one
    that has, without the statistics to fit from."""
    per_head = [artifact for artifact in artifacts if artifact.rotations.per_head]
    if not per_head:
        raise UsageError(
            "--pooled is for artifacts with one rotation per KV head, and none is given",
            hint="leave it out",
        )
    for artifact in per_head:
        _check_statistics(artifact)


def _check_statistics(artifact: Artifact) -> None:
    recipe = artifact.recipe
    if recipe.composition == GIVEN or (recipe.needs_statistics and artifact.statistics is None):
        raise RotationZooError(
            f"{artifact.folder} cannot be pooled: it has no statistics to fit one rotation per "
            "layer from",
            hint="fetch it with its statistics, or make one with: rotationzoo calibrate MODEL",
        )


def pooled_rotations(artifact: Artifact, per_head: Rotations) -> Rotations:
    """One rotation per layer, in the frame of the artifact's `per_head` rotations: that of the
    published weights, or of the folded ones.

    The rotations themselves cannot be averaged: a mean of rotations is not orthogonal. Raises as
    `check_pooled` does.
    """
    _check_statistics(artifact)
    # Means and equalizers are not fitted again but copied from the artifact, since statistics
    # recovered from imported files have none.
    changes: dict[str, Any] = {
        "pooling": "layer",
        "center_keys": False,
        "center_values": False,
        "equalize": False,
        "feedback": False,
    }
    changes |= {f"{side}_clip": ratio for side, ratio in artifact.clip_ratios.items()}
    moments = None if artifact.statistics is None else sums(artifact.statistics)
    if moments is not None:
        moments = fold_statistics(moments, stored_equalizers(artifact.rotations))
    fitted = fit(moments, artifact.recipe.model_copy(update=changes), artifact.geometry)

    def complete(layer: int, side: str, rotation: Rotation) -> Rotation:
        kept = per_head[layer][side]
        return replace(rotation, mean=kept.mean, equalizer=kept.equalizer)

    return fitted.replace(complete)
