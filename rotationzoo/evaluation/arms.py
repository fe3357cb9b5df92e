"""The arms of an evaluation: variants of the user's artifacts, and baselines without data."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product

from rotationzoo.artifact.fit import fit
from rotationzoo.artifact.measured import AboutArm
from rotationzoo.artifact.reductions import reduced_rotations
from rotationzoo.artifact.scores import ALL_ELSE
from rotationzoo.artifact.store import Artifact
from rotationzoo.budget import Budget
from rotationzoo.codec.bit_allocation import spend_bits
from rotationzoo.codec.formats import BUDGETED
from rotationzoo.codec.rotated import RotatedCodec
from rotationzoo.geometry import Geometry
from rotationzoo.linalg.composition_table import DATA_FREE
from rotationzoo.linalg.moments import sums
from rotationzoo.recipe import Recipe
from rotationzoo.recipe.loading import PRESETS
from rotationzoo.rotations import Rotations
from rotationzoo.simulation import rivals
from rotationzoo.simulation.simulated import SimulatedCodec

KIVI = "kivi"
BASELINES = (*DATA_FREE, KIVI)  # the default; "hadamard" adds an arm with all else the same
RIVALS = tuple(rivals.ENGINE_CACHES)  # caches of other engines, measured on request
_VARIANTS = "", "+transform", "+pooled"  # suffixes in the names of an artifact's arms


@dataclass(frozen=True)
class Arm:
    """One arm of a comparison: a codec, and its description in the report."""

    about: AboutArm
    codec: SimulatedCodec

    @property
    def name(self) -> str:
        return self.about.name


def shared_recipe(artifacts: list[Artifact]) -> Recipe:
    """The recipe that gives the baselines their clip ratios, group size and windows."""
    return artifacts[0].recipe if artifacts else Recipe()


def build_arms(
    artifacts: list[Artifact],
    geometry: Geometry,
    baselines: Collection[str] = BASELINES,
    pooled: bool = False,
    uncentered: Collection[str] = (),
    budgets: Sequence[Budget | None] = (None,),
) -> list[Arm]:
    """One arm of nearest codes per artifact and budget, in order; then one with transform coding
    for each that has the matrices; with `pooled`, one with one rotation per layer for each that has
    more; then one per baseline, in the order of `BASELINES` and `RIVALS`. All names differ.

    - `uncentered`: the sides that artifacts' arms store with their mean.
    - `budgets`: budgets of bits; None is an artifact's own.
    """
    made: dict[str, list[Arm]] = {ending: [] for ending in _VARIANTS}
    names: list[str] = []
    for artifact in artifacts:
        names.append(_unique_name(artifact, names))
    for (artifact, name), budget in product(zip(artifacts, names, strict=True), budgets):
        if budget and len(budgets) > 1 and budget.bits != artifact.recipe.budget.bits:
            name += f"-{budget.bits:g}-bits"
        codec = RotatedCodec(
            reduced_rotations(artifact, False, uncentered, budget), artifact.recipe.group_size
        )
        about = AboutArm(name=name, kind="artifact", artifact=artifact.identity)
        made[""].append(Arm(about, codec))
        if codec.rotations.has_transform:
            coded = {"name": f"{name}+transform", "rounding": "transform"}
            coder = replace(codec, rounding="transform")
            made["+transform"].append(Arm(about.model_copy(update=coded), coder))
        if pooled and codec.rotations.per_head:
            changed = about.model_copy(update={"name": f"{name}+pooled", "pooled": True})
            rotations = reduced_rotations(artifact, True, uncentered)
            made["+pooled"].append(Arm(changed, replace(codec, rotations=rotations)))
    others = build_baselines(shared_recipe(artifacts), geometry, baselines)
    if artifacts and "hadamard" in baselines:
        spent = reduced_rotations(artifacts[0], False, uncentered, budgets[0])
        others += _all_else_the_same(artifacts[0], spent, budgets[0])
    return [*chain.from_iterable(made.values()), *others]


def _all_else_the_same(artifact: Artifact, own: Rotations, budget: Budget | None) -> list[Arm]:
    """The arm of a Hadamard matrix with an artifact's `own` means, and with transform coding in as
    many bits; none without statistics."""
    if artifact.statistics is None or not own.has_transform:
        return []
    recipe = artifact.recipe.model_copy(update={"composition": "hadamard"})
    fitted = fit(sums(artifact.statistics), recipe, artifact.geometry)
    spent = spend_bits(fitted, budget or recipe.budget)
    rotations = own.replace(lambda i, side, old: replace(spent[i][side], mean=old.mean))
    about = AboutArm(name=ALL_ELSE, kind="baseline", rounding="transform")
    return [Arm(about, RotatedCodec(rotations, rounding="transform"))]


def judged_arms(arms: Sequence[Arm], format: str | None, pooled: bool) -> list[str]:
    """The arm of each artifact to decide on: pooled, with transform coding, or plain."""
    names = [arm.name for arm in arms]
    endings = [*["+pooled"] * pooled, *["+transform"] * (format == BUDGETED), ""]
    judged = []
    for plain in (arm.name for arm in arms if arm.about.is_plain):
        judged.append(next(plain + ending for ending in endings if plain + ending in names))
    return judged


def build_baselines(
    shared: Recipe, geometry: Geometry, names: Collection[str] = BASELINES
) -> list[Arm]:
    """The baselines among `names`, with the clip ratios and group size of the `shared` recipe."""
    settings = {key: getattr(shared, key) for key in ("key_clip", "value_clip", "group_size")}
    codecs: dict[str, SimulatedCodec] = {}
    for name in DATA_FREE:  # also the names of presets, whose fit needs no statistics
        rotations = fit(None, PRESETS[name].model_copy(update=settings), geometry)
        codecs[name] = RotatedCodec(rotations, shared.group_size)
    codecs[KIVI] = rivals.RivalCodec(rivals.store_as_kivi)
    codecs |= {name: rivals.RivalCodec.of_engine(name) for name in RIVALS}
    chosen = [name for name in codecs if name in names]
    return [Arm(AboutArm(name=name, kind="baseline"), codecs[name]) for name in chosen]


def _unique_name(artifact: Artifact, taken: Sequence[str]) -> str:
    """The name of the artifact's folder, made unique among arms by its hash, and by a number for an
    artifact that is given twice. A report may be published, and full paths are private."""
    used = {name + ending for name in (*BASELINES, *RIVALS, *taken) for ending in _VARIANTS}
    name = artifact.folder.resolve().name
    if any(name + ending in used for ending in _VARIANTS):
        name = f"{name} {artifact.identity[:8]}"
    if name in used:
        name = f"{name} ({len(taken) + 1})"
    return name
