"""The arms of an evaluation: the artifacts that it was given, and beside them what costs no
calibration."""

from rotationzoo.artifact.store import Artifact
from rotationzoo.cache.arm import Arm
from rotationzoo.calibration.fit import fit
from rotationzoo.model.geometry import Geometry
from rotationzoo.recipe import PRESETS, Recipe

BASELINES = ("identity", "hadamard", "random")


def shared_recipe(artifacts: list[Artifact]) -> Recipe:
    """Clip ratios, group size and windows for what brings none: the first artifact's, so that arms
    differ in their rotations alone. A plain recipe where there is no artifact."""
    if not artifacts:
        return Recipe()
    clips = {f"{side}_clip": ratio for side, ratio in artifacts[0].clip_ratios.items()}
    return artifacts[0].recipe.model_copy(update=clips)


def arms_of(artifacts: list[Artifact], geometry: Geometry) -> list[Arm]:
    """An arm for each artifact, in their order and of different names, then the baselines."""
    arms: list[Arm] = []
    for artifact in artifacts:
        taken = {*BASELINES, *(arm.name for arm in arms)}
        name = artifact.folder.resolve().name
        if name in taken:  # by its hash: paths are not for a report that may be published
            name = f"{name} {artifact.identity[:8]}"
        if name in taken:
            name = f"{name} ({len(arms) + 1})"
        arms.append(Arm(name, artifact.rotations, artifact.recipe.group_size))
    shared = shared_recipe(artifacts)
    same = {key: getattr(shared, key) for key in ("key_clip", "value_clip", "group_size")}
    for name in BASELINES:
        rotations = fit(None, PRESETS[name].model_copy(update=same), geometry)
        arms.append(Arm(name, rotations, shared.group_size))
    return arms
