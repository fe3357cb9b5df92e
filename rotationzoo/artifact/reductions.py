"""Reductions: parts of an artifact that are left out or pooled, because an engine takes less."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rotationzoo.artifact.fit import fit
from rotationzoo.artifact.store import Artifact
from rotationzoo.budget import Budget
from rotationzoo.codec.engine_needs import check_sides, find_engine
from rotationzoo.codec.settings import reduce_rotations
from rotationzoo.errors import RotationZooError, UsageError
from rotationzoo.linalg.composition_table import GIVEN
from rotationzoo.linalg.moments import sums
from rotationzoo.rotations import SIDES, Rotation, Rotations
from rotationzoo.sides import EVERY_SIDE


@dataclass(frozen=True)
class Request:
    """The settings of an export, as the user gave them: with one rotation per layer (`pooled`),
    without means (`uncentered`), with clip ratios of keys and values, or sink and recent tokens
    (`windows`), instead of the artifact's own. `base`: for llama.cpp, the GGUF file to copy."""

    engine: str
    output: Path | None = None
    pooled: bool = False
    uncentered: bool = False
    clip: tuple[float, float] | None = None
    windows: tuple[int, int] | None = None
    base: Path | None = None


@dataclass(frozen=True)
class Settled(Request):
    """A request with a value for every setting."""

    clip: tuple[float, float] = (1.0, 1.0)
    windows: tuple[int, int] = (0, 0)


def distinct_clips(rotations: Rotations) -> tuple[list[float], ...]:
    """The distinct clip ratios of keys and of values, ascending."""
    ratios: dict[str, set[float]] = {side: set() for side in SIDES}
    for layer in rotations.values():
        for side in SIDES:
            ratios[side].update(layer[side].clip.tolist())
    return tuple(map(sorted, ratios.values()))


def dropped_means(artifact: Artifact, request: Request) -> list[str]:
    """The sides whose means the engine or the user leaves out."""
    kept = () if request.uncentered else find_engine(request.engine).means
    sides = [side for side in EVERY_SIDE if side in artifact.rotations.sides]
    return [side for side in sides if artifact.recipe.centers(side) and side not in kept]


def settle_request(artifact: Artifact, request: Request) -> Settled:
    """The request with all settings: those that the user left out are as the engine needs them, or
    the artifact's own. Raises `UsageError` for settings that the engine cannot use."""
    engine = find_engine(request.engine)
    check_sides(request.engine, artifact.rotations.sides)
    windows = (artifact.recipe.sink, artifact.recipe.recent) if engine.windows else (0, 0)
    if not engine.windows and request.windows not in (None, windows):
        raise UsageError(f"{request.engine} keeps no tokens exact", hint="leave out --windows")
    # The highest ratio clips least. Lower ones were chosen for heads that tolerate them.
    keys, values = map(max, distinct_clips(artifact.rotations))
    if engine.clip == "none" and request.clip:
        raise UsageError(f"{request.engine} clips nothing", hint="leave out --clip")
    clip = (1.0, 1.0) if engine.clip == "none" else request.clip or (keys, values)
    if engine.clip == "one" and clip[0] != clip[1]:
        if request.clip:
            raise UsageError(f"{request.engine} has a single clip ratio", f"--clip {max(clip):g}")
        clip = (max(clip), max(clip))
    pooled, windows = request.pooled or not engine.heads, request.windows or windows
    return Settled(**vars(request) | {"pooled": pooled, "clip": clip, "windows": windows})


def list_reductions(artifact: Artifact, request: Settled) -> list[str]:
    """The parts of an artifact that a request leaves out or replaces, in words."""
    engine, recipe, rotations = find_engine(request.engine), artifact.recipe, artifact.rotations
    dropped = " and ".join(f"{side}s" for side in dropped_means(artifact, request))
    ratios = "/".join(f"{ratio:g}" for ratio in request.clip)
    same_clips = distinct_clips(rotations) == tuple([ratio] for ratio in request.clip)
    chosen, own = "/".join(map(str, request.windows)), f"{recipe.sink}/{recipe.recent}"
    lost = {
        "rotations: only the bits of each layer are written": not engine.rotates,
        "one rotation per layer instead of one per KV head": request.pooled and rotations.per_head,
        f"{dropped} that keep their mean": dropped,
        f"clip ratios {ratios} instead of the artifact's own": (
            engine.clip != "head" and not same_clips
        ),
        f"windows {chosen} instead of {own}": chosen != own,
        "nearest codes instead of transform coding": (
            rotations.has_transform and not engine.budget
        ),
    }
    return [words for words, applies in lost.items() if applies]


def describe_losses(name: str, artifacts: Iterable[Artifact]) -> str:
    """The parts of artifacts that an engine leaves out, in one line."""
    lost: dict[str, None] = {}
    for artifact in artifacts:
        lost |= dict.fromkeys(list_reductions(artifact, settle_request(artifact, Request(name))))
    return f"Lost for {name}: {'; '.join(lost) or 'nothing'}"


def check_pooled(artifacts: Sequence[Artifact]) -> None:
    """Raise `UsageError` if no artifact has one rotation per KV head, and `RotationZooError` if one
    of those that have lacks the statistics."""
    per_head = [artifact for artifact in artifacts if artifact.rotations.per_head]
    if not per_head:
        problem = "--pooled is for artifacts with one rotation per KV head, and none is given"
        raise UsageError(problem, "leave it out")
    for artifact in per_head:
        _check_statistics(artifact)


def _check_statistics(artifact: Artifact) -> None:
    complete = artifact.statistics is not None or not artifact.recipe.needs_statistics
    if not complete or artifact.recipe.composition == GIVEN:
        problem = f"{artifact.folder} cannot be pooled: it has no statistics for one rotation per"
        hint = "fetch it with its statistics, or make one with: rotationzoo calibrate MODEL"
        raise RotationZooError(f"{problem} layer", hint)


def pooled_rotations(artifact: Artifact) -> Rotations:
    """One rotation per layer, from an artifact's statistics: a mean of rotations would not be
    orthogonal. Raises `RotationZooError` without statistics."""
    _check_statistics(artifact)
    left_out = dict.fromkeys(("center_keys", "center_values", "transform"), False)
    recipe = artifact.recipe.model_copy(update={"pooling": "layer", **left_out})
    moments = None if artifact.statistics is None else sums(artifact.statistics)
    fitted = fit(moments, recipe, artifact.geometry)

    def complete(layer: int, side: str, rotation: Rotation) -> Rotation:
        return replace(rotation, mean=artifact.rotations[layer][side].mean)

    return fitted.replace(complete)


def reduced_rotations(
    artifact: Artifact, pooled: bool, uncentered: Collection[str], budget: Budget | None = None
) -> Rotations:
    """An artifact's rotations as `reduce_rotations` makes them, one per layer if `pooled`. Raises
    as `pooled_rotations` and `spend_bits`."""
    rotations = artifact.rotations
    if pooled and rotations.per_head:
        # Only engines without a budget of bits take one rotation per layer.
        rotations, budget = pooled_rotations(artifact), None
    return reduce_rotations(rotations, uncentered, budget)
