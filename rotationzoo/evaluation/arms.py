"""The arms of an evaluation: the artifacts that it was given, and baselines that need no
calibration."""

from rotationzoo.artifact.store import Artifact
from rotationzoo.cache.arm import Arm
from rotationzoo.calibration.fit import fit
from rotationzoo.model.geometry import Geometry
from rotationzoo.recipe import PRESETS, Recipe

BASELINES = ("identity", "hadamard", "random")


def shared_recipe(artifacts: list[Artifact]) -> Recipe:
    """The recipe whose clip ratios, group size and windows the baselines share: that of the first
    artifact, so that arms differ in their rotations alone, or the default without artifacts."""
    if not artifacts:
        return Recipe()
    clips = {f"{side}_clip": ratio for side, ratio in artifacts[0].clip_ratios.items()}
    return artifacts[0].recipe.model_copy(update=clips)


def build_arms(artifacts: list[Artifact], geometry: Geometry) -> list[Arm]:
    """An arm for each artifact, in their order, then one for each baseline; no two have the same
    name."""
    arms: list[Arm] = []
    for artifact in artifacts:
        name = _unique_name(artifact, arms)
        arms.append(Arm(name, artifact.rotations, artifact.recipe.group_size))
    shared = shared_recipe(artifacts)
    codec = {key: getattr(shared, key) for key in ("key_clip", "value_clip", "group_size")}
    for name in BASELINES:
        # These recipes make rotations of shapes alone, without statistics.
        rotations = fit(None, PRESETS[name].model_copy(update=codec), geometry)
        arms.append(Arm(name, rotations, shared.group_size))
    return arms


def _unique_name(artifact: Artifact, arms: list[Arm]) -> str:
    """The name of the artifact's folder; where it is in use, with the artifact's hash, since a
    report may be published and whole paths are private; and with a number behind that for the same
    artifact given twice."""
    used = {*BASELINES, *(arm.name for arm in arms)}
    name = artifact.folder.resolve().name
    if name in used:
        name = f"{name} {artifact.identity[:8]}"
    if name in used:
        name = f"{name} ({len(arms) + 1})"
    return name
