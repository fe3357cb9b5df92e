"""The arms of an evaluation: the user's artifacts, and baselines that need no calibration."""

from rotationzoo.artifact.store import Artifact
from rotationzoo.artifact.weights import rotations_for
from rotationzoo.cache.arm import Arm
from rotationzoo.cache.kivi import KiviArm
from rotationzoo.calibration.fit import fit
from rotationzoo.model.geometry import Geometry
from rotationzoo.model.source import Source
from rotationzoo.recipe import PRESETS, Recipe

DATA_FREE = ("identity", "hadamard", "random")
"""Presets that need no statistics."""
KIVI = "kivi"
BASELINES = (*DATA_FREE, KIVI)


def shared_recipe(artifacts: list[Artifact]) -> Recipe:
    """The recipe whose clip ratios, group size and windows the baselines use.

    It is the first artifact's recipe, so that the baselines differ from that artifact only in their
    rotations. Without artifacts it is the default recipe.
    """
    if not artifacts:
        return Recipe()
    clips = {f"{side}_clip": ratio for side, ratio in artifacts[0].clip_ratios.items()}
    return artifacts[0].recipe.model_copy(update=clips)


def build_arms(artifacts: list[Artifact], geometry: Geometry, source: Source) -> list[Arm]:
    """One arm per artifact, in the given order, followed by one per baseline. All names differ.

    `source`: the evaluated model, whose weights may carry an artifact's equalizer.
    """
    arms: list[Arm] = []
    for artifact in artifacts:
        name = _unique_name(artifact, arms)
        arms.append(Arm(name, rotations_for(artifact, source), artifact.recipe.group_size))
    return [*arms, *build_baselines(shared_recipe(artifacts), geometry)]


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
    used = {*BASELINES, *(arm.name for arm in arms)}
    name = artifact.folder.resolve().name
    if name in used:
        name = f"{name} {artifact.identity[:8]}"
    if name in used:
        name = f"{name} ({len(arms) + 1})"
    return name
