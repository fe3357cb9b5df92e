"""The arms of an evaluation: the user's artifacts, with error feedback too where they can, and
baselines that need no calibration."""

from collections.abc import Collection
from dataclasses import replace

from rotationzoo.artifact.store import Artifact
from rotationzoo.artifact.weights import rotations_for
from rotationzoo.calibration.fit import fit
from rotationzoo.evaluation.pooled import pooled_name, pooled_rotations
from rotationzoo.model.geometry import Geometry
from rotationzoo.model.source import Source
from rotationzoo.recipe import PRESETS, Recipe
from rotationzoo.simulation.arm import Arm
from rotationzoo.simulation.kivi import KiviArm

DATA_FREE = ("identity", "hadamard", "random")
"""Presets that need no statistics."""
KIVI = "kivi"
BASELINES = (*DATA_FREE, KIVI)
_FEEDBACK = "+feedback"


def shared_recipe(artifacts: list[Artifact]) -> Recipe:
    """The recipe whose clip ratios, group size and windows the baselines use.

    It is the first artifact's recipe, so that the baselines differ from that artifact only in their
    rotations. Without artifacts it is the default recipe.
    """
    if not artifacts:
        return Recipe()
    clips = {f"{side}_clip": ratio for side, ratio in artifacts[0].clip_ratios.items()}
    return artifacts[0].recipe.model_copy(update=clips)


def feedback_name(name: str) -> str:
    """The name of the arm that writes an artifact's rows with error feedback, from that of the arm
    with the nearest codes."""
    return name + _FEEDBACK


def feedback_arms(names: Collection[str]) -> list[str]:
    """Those of all arms' names that are of arms with error feedback."""
    return [feedback_name(name) for name in names if feedback_name(name) in names]


def build_arms(
    artifacts: list[Artifact],
    geometry: Geometry,
    source: Source,
    baselines: Collection[str] = BASELINES,
    pooled: bool = False,
) -> list[Arm]:
    """One arm per artifact, in the given order; then one with error feedback for each that has its
    factors; then one with one rotation per layer for each that has more; then one per baseline. All
    names differ.

    - `source`: the evaluated model, whose weights may carry an artifact's equalizer.
    - `baselines`: those to compare with, in the order of `BASELINES`.
    - `pooled`: whether to add the arms with one rotation per layer.
    """
    arms: list[Arm] = []
    for artifact in artifacts:
        name = _unique_name(artifact, arms)
        arms.append(Arm(name, rotations_for(artifact, source), artifact.recipe.group_size))
    with_factors = [arm for arm in arms if arm.rotations.has_feedback]
    for arm in with_factors:
        arms.append(replace(arm, name=feedback_name(arm.name), rounding="feedback"))
    for artifact, arm in zip(artifacts, tuple(arms), strict=False):
        if pooled and arm.rotations.per_head:
            rotations = pooled_rotations(artifact, arm.rotations)
            arms.append(replace(arm, name=pooled_name(arm.name), rotations=rotations))
    all_baselines = build_baselines(shared_recipe(artifacts), geometry)
    return [*arms, *(arm for arm in all_baselines if arm.name in baselines)]


def build_baselines(shared: Recipe, geometry: Geometry) -> list[Arm]:
    """One arm per baseline, at the clip ratios and the group size of the `shared` recipe."""
    codec = {key: getattr(shared, key) for key in ("key_clip", "value_clip", "group_size")}
    arms: list[Arm] = []
    for name in DATA_FREE:
        # Their rotations depend only on shapes, so they are fitted without statistics.
        rotations = fit(None, PRESETS[name].model_copy(update=codec), geometry)
        arms.append(Arm(name, rotations, shared.group_size))
    # What a user may pick instead of any rotation.
    return [*arms, KiviArm(KIVI, fit(None, PRESETS["identity"], geometry))]


def _unique_name(artifact: Artifact, arms: list[Arm]) -> str:
    """The name of the artifact's folder, made unique among the arms.

    If the name is taken, the start of the artifact's hash is appended. If the same artifact is
    given twice, a number follows. Full paths are never used: they are private, and a report may be
    published.
    """
    # The names of arms with error feedback, or with one rotation per layer, are taken, too.
    used = {*BASELINES, *(arm.name for arm in arms)}
    used |= {add(name) for name in used for add in (feedback_name, pooled_name)}
    name = artifact.folder.resolve().name
    if not used.isdisjoint((name, feedback_name(name), pooled_name(name))):
        name = f"{name} {artifact.identity[:8]}"
    if name in used:
        name = f"{name} ({len(arms) + 1})"
    return name
