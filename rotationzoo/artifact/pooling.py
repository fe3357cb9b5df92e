"""Pooling: what an engine that takes one rotation per layer reads of an artifact with one per KV
head."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from rotationzoo.artifact.fit import fit
from rotationzoo.artifact.store import Artifact
from rotationzoo.budget import Budget
from rotationzoo.codec.settings import reduce_rotations
from rotationzoo.errors import RotationZooError, UsageError
from rotationzoo.linalg.composition_table import GIVEN
from rotationzoo.linalg.moments import sums
from rotationzoo.rotations import Rotation, Rotations


def check_pooled(artifacts: Sequence[Artifact]) -> None:
    """Raise `UsageError` if no artifact has a rotation per KV head, and `RotationZooError` for one
    that has, without the statistics to fit from."""
    per_head = [artifact for artifact in artifacts if artifact.rotations.per_head]
    if not per_head:
        problem = "--pooled is for artifacts with one rotation per KV head, and none is given"
        hint = "leave it out"
        raise UsageError(problem, hint)
    for artifact in per_head:
        _check_statistics(artifact)


def _check_statistics(artifact: Artifact) -> None:
    complete = artifact.statistics is not None or not artifact.recipe.needs_statistics
    if not complete or artifact.recipe.composition == GIVEN:
        raise RotationZooError(
            f"{artifact.folder} cannot be pooled: it has no statistics to fit one rotation per "
            "layer from",
            hint="fetch it with its statistics, or make one with: rotationzoo calibrate MODEL",
        )


def pooled_rotations(artifact: Artifact) -> Rotations:
    """One rotation per layer, fitted from the statistics of an artifact.

    The rotations themselves cannot be averaged: a mean of rotations is not orthogonal. Raises as
    `check_pooled` does.
    """
    _check_statistics(artifact)
    # Means are not fitted again but copied from the artifact, since statistics recovered from
    # imported files have none.
    left_out = dict.fromkeys(("center_keys", "center_values", "feedback"), False)
    recipe = artifact.recipe.model_copy(update={"pooling": "layer", **left_out})
    moments = None if artifact.statistics is None else sums(artifact.statistics)
    fitted = fit(moments, recipe, artifact.geometry)

    def complete(layer: int, side: str, rotation: Rotation) -> Rotation:
        return replace(rotation, mean=artifact.rotations[layer][side].mean)

    return fitted.replace(complete)


def reduced_rotations(
    artifact: Artifact, pooled: bool, uncentered: Collection[str], budget: Budget | None = None
) -> Rotations:
    """The rotations of an artifact as `reduce_rotations` has them, one per layer if `pooled`.
    Raises as `check_pooled` and `spend_bits` do."""
    rotations = artifact.rotations
    if pooled and rotations.per_head:
        # Only engines without a budget of bits take one rotation per layer.
        rotations, budget = pooled_rotations(artifact), None
    return reduce_rotations(rotations, artifact.recipe.group_size, uncentered, budget)
