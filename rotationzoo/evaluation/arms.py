"""The arms of an evaluation: the user's artifacts, with error feedback too where they can, and with
one rotation per layer if that is asked; and baselines that need no calibration."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from rotationzoo.artifact.measured import AboutArm
from rotationzoo.artifact.store import Artifact
from rotationzoo.calibration.budget import spend_bits
from rotationzoo.calibration.fit import fit
from rotationzoo.codec.formats import BUDGETED, SIMULATED
from rotationzoo.errors import RotationZooError, UsageError
from rotationzoo.geometry import Geometry
from rotationzoo.linalg.compositions import GIVEN
from rotationzoo.linalg.moments import sums
from rotationzoo.model.loading import full_attention_layers
from rotationzoo.recipe import PRESETS, Recipe, with_budget
from rotationzoo.rotations import Rotation, Rotations
from rotationzoo.simulation.arm import Arm
from rotationzoo.simulation.engine_caches import ENGINE_CACHES, EngineArm
from rotationzoo.simulation.kivi import KiviArm

if TYPE_CHECKING:
    from transformers import PretrainedConfig

DATA_FREE = ("identity", "hadamard", "random")
"""Presets that need no statistics."""
KIVI = "kivi"
BASELINES = (*DATA_FREE, KIVI)
"""Those that every evaluation measures."""
RIVALS = tuple(ENGINE_CACHES)
"""Other engines' caches, which are measured where somebody asks for them."""
SIMULATED_ALONE = {KIVI, *RIVALS}
"""Those that no cache of ours stores."""
Bits = float | Literal["equal"] | None
"""Another budget of bits than the artifacts', or `equal` where theirs is left out."""
_VARIANTS = "", "+feedback", "+pooled"
"""The ends of the names of an artifact's arms."""


@dataclass(frozen=True)
class TestedArm:
    """An arm, and what the report says that it is."""

    arm: Arm
    about: AboutArm


def shared_recipe(artifacts: list[Artifact]) -> Recipe:
    """The recipe whose clip ratios, group size and windows the baselines use.

    It is the first artifact's recipe, so that the baselines differ from that artifact only in their
    rotations. Without artifacts it is the default recipe.
    """
    return artifacts[0].recipe if artifacts else Recipe()


def build_arms(
    artifacts: list[Artifact],
    geometry: Geometry,
    baselines: Collection[str] = BASELINES,
    pooled: bool = False,
    uncentered: Collection[str] = (),
    bits: Bits = None,
) -> list[TestedArm]:
    """One arm per artifact, in the given order; then one with error feedback for each that has its
    factors; then one with one rotation per layer for each that has more; then one per baseline. All
    names differ.

    - `baselines`: those to compare with, in the order of `BASELINES` and `RIVALS`.
    - `pooled`: whether to add the arms with one rotation per layer.
    - `uncentered`: the sides that artifacts' arms store with their mean.
    - `bits`: the budget of the artifacts' arms.
    """
    plain: list[TestedArm] = []
    for artifact in artifacts:
        name = _unique_name(artifact, [tested.arm.name for tested in plain])
        rotations = reduced_rotations(artifact, False, uncentered, bits)
        arm = Arm(name, rotations, artifact.recipe.group_size)
        about = AboutArm(name=name, kind="artifact", artifact=artifact.identity)
        plain.append(TestedArm(arm, about))
    with_feedback = [_vary(each, "+feedback") for each in plain if each.arm.rotations.has_feedback]
    one_a_layer: list[TestedArm] = []
    for artifact, each in zip(artifacts, plain, strict=True):
        if pooled and each.arm.rotations.per_head:
            rotations = reduced_rotations(artifact, True, uncentered)
            one_a_layer.append(_vary(each, "+pooled", rotations))
    others = []
    rivals = [EngineArm(name) for name in RIVALS]
    for baseline in (*build_baselines(shared_recipe(artifacts), geometry), *rivals):
        if baseline.name in baselines:
            others.append(TestedArm(baseline, AboutArm(name=baseline.name, kind="baseline")))
    return [*plain, *with_feedback, *one_a_layer, *others]


def judged_arms(
    tested: Sequence[TestedArm], rounding: Literal["nearest", "feedback"] | None, pooled: bool
) -> list[str]:
    """The arm of each artifact that the decision is about: `pooled` if it has one, or else with
    error feedback if it has its factors, unless the `rounding` is nearest."""
    names = [each.arm.name for each in tested]
    wanted = ["+pooled"] * pooled + ["+feedback"] * (rounding != "nearest") + [""]
    judged = []
    for each in tested:
        about = each.about
        if about.kind == "artifact" and about.rounding == "nearest" and not about.pooled:
            mine = [about.name + ending for ending in wanted]
            judged.append(next(name for name in mine if name in names))
    return judged


def _vary(plain: TestedArm, ending: str, rotations: Rotations | None = None) -> TestedArm:
    """The same arm with error feedback, or with one rotation per layer, which are `rotations`."""
    name = plain.arm.name + ending
    if rotations is not None:
        about = plain.about.model_copy(update={"name": name, "pooled": True})
        return TestedArm(replace(plain.arm, name=name, rotations=rotations), about)
    about = plain.about.model_copy(update={"name": name, "rounding": "feedback"})
    return TestedArm(replace(plain.arm, name=name, rounding="feedback"), about)


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


def _unique_name(artifact: Artifact, taken: Sequence[str]) -> str:
    """The name of the artifact's folder, made unique among the names of other artifacts.

    If the name is taken, the start of the artifact's hash is appended. If the same artifact is
    given twice, a number follows. Full paths are never used: they are private, and a report may be
    published.
    """
    # The names of arms with error feedback, or with one rotation per layer, are taken, too.
    used = {name + ending for name in (*BASELINES, *RIVALS, *taken) for ending in _VARIANTS}
    name = artifact.folder.resolve().name
    if any(name + ending in used for ending in _VARIANTS):
        name = f"{name} {artifact.identity[:8]}"
    if name in used:
        name = f"{name} ({len(taken) + 1})"
    return name


def check_rivals(baselines: Collection[str], geometry: Geometry) -> None:
    """Raise `UsageError` for a rival among the baselines that cannot store this model's heads."""
    for name in RIVALS:
        if name in baselines:
            EngineArm(name).check(geometry)


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


def has_statistics(artifact: Artifact) -> bool:
    """Whether an artifact has what one rotation per layer is fitted from."""
    complete = artifact.statistics is not None or not artifact.recipe.needs_statistics
    return complete and artifact.recipe.composition != GIVEN


def _check_statistics(artifact: Artifact) -> None:
    if not has_statistics(artifact):
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
    changes: dict[str, Any] = {
        "pooling": "layer",
        "center_keys": False,
        "center_values": False,
        "feedback": False,
    }
    moments = None if artifact.statistics is None else sums(artifact.statistics)
    fitted = fit(moments, artifact.recipe.model_copy(update=changes), artifact.geometry)

    def complete(layer: int, side: str, rotation: Rotation) -> Rotation:
        return replace(rotation, mean=artifact.rotations[layer][side].mean)

    return fitted.replace(complete)


def reduced_rotations(
    artifact: Artifact, pooled: bool, uncentered: Collection[str], bits: Bits = None
) -> Rotations:
    """The rotations of an artifact as an engine takes them: one per layer, if `pooled`, without the
    means of the sides `uncentered`, and with the budget of `bits`. Raises as `check_pooled` and
    `spend_bits` do."""
    rotations = artifact.rotations
    if bits is not None and bits != "equal":
        rotations = spend_bits(rotations, with_budget(artifact.recipe, bits=bits))
    if pooled and rotations.per_head:
        rotations = pooled_rotations(artifact)

    def reduce(_: int, side: str, rotation: Rotation) -> Rotation:
        mean = None if side in uncentered else rotation.mean
        fine = None if bits == "equal" else rotation.fine_channels
        return replace(rotation, mean=mean, fine_channels=fine)

    return rotations.replace(reduce)


def check_bits(bits: Bits, has_budget: bool, format: str) -> None:
    """Raise `UsageError` for another budget of `bits` where no rotations have one, and where rows
    of the `format` have no room for it."""
    if bits in (None, "equal"):
        return
    if not has_budget:
        raise UsageError(
            "--bits is for rotations that have a budget of bits, and none have",
            hint="leave it out, or make some with: rotationzoo calibrate MODEL --bits 2.5",
        )
    if SIMULATED[format].offset != "none":
        raise UsageError(
            f"rows of the format {format} have the same bits in all layers",
            hint=f"leave out --bits, or add: --format {BUDGETED}",
        )


def bits_beside_windows(
    bits: Bits, artifacts: Collection[Artifact], config: "PretrainedConfig"
) -> Bits:
    """The budget of artifacts in an engine that keeps layers with a sliding window exact: `equal`
    beside such layers, because it pads the pages of all layers to the largest. Raises `UsageError`
    where other `bits` are asked for there."""
    has_budget = any(artifact.rotations.has_budget for artifact in artifacts)
    if not has_budget or full_attention_layers(config) is None:
        return bits
    if bits is not None:
        raise UsageError(
            "beside layers with a sliding window, all others have the same bits",
            hint="leave out --bits",
        )
    return "equal"
