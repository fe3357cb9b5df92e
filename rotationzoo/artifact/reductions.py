"""Reductions: what is left out of an artifact, or pooled, because its engine takes less."""

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
    """The settings of one export, as the user gave them."""

    engine: str
    output: Path | None = None
    pooled: bool = False
    """One rotation per layer instead of one per KV head."""
    uncentered: bool = False
    """Leave out the means: keys and values are rotated as they are."""
    clip: tuple[float, float] | None = None
    """Clip ratios of keys and of values, instead of the artifact's own."""
    windows: tuple[int, int] | None = None
    """Sink and recent tokens, instead of the artifact's own."""
    base: Path | None = None
    """llama.cpp: the GGUF file to copy."""


@dataclass(frozen=True)
class Settled(Request):
    """A request that leaves nothing open."""

    clip: tuple[float, float] = (1.0, 1.0)
    windows: tuple[int, int] = (0, 0)


def distinct_clips(rotations: Rotations) -> tuple[list[float], ...]:
    """The distinct clip ratios of keys and of values, ascending."""
    ratios: dict[str, set[float]] = {side: set() for side in SIDES}
    for layer in rotations.values():
        for side in SIDES:
            ratios[side].update(layer[side].clip.tolist())
    return tuple(sorted(ratios[side]) for side in SIDES)


def dropped_means(artifact: Artifact, request: Request) -> list[str]:
    """The sides whose means are left out, by the engine or by the user."""
    kept = () if request.uncentered else find_engine(request.engine).means
    mine = [side for side in EVERY_SIDE if side in artifact.rotations.sides]
    return [side for side in mine if artifact.recipe.centers(side) and side not in kept]


def settle_request(artifact: Artifact, request: Request) -> Settled:
    """The request with all that the user left open: pooling, clip ratios and windows as the engine
    takes them, or else the artifact's own. Raises `UsageError` for what the engine does not take.
    """
    engine = find_engine(request.engine)
    check_sides(request.engine, artifact.rotations.sides)
    windows = (artifact.recipe.sink, artifact.recipe.recent) if engine.windows else (0, 0)
    if not engine.windows and request.windows not in (None, windows):
        raise UsageError(f"{request.engine} keeps no tokens exact", hint="leave out --windows")
    # The highest ratio clips least: lower ones were chosen for heads that tolerate them.
    keys, values = map(max, distinct_clips(artifact.rotations))
    if engine.clip == "none" and request.clip:
        raise UsageError(f"{request.engine} clips nothing", hint="leave out --clip")
    clip = (1.0, 1.0) if engine.clip == "none" else request.clip or (keys, values)
    if engine.clip == "one" and clip[0] != clip[1]:
        if request.clip:
            raise UsageError(f"{request.engine} has a single clip ratio", f"--clip {max(clip):g}")
        clip = (max(clip), max(clip))
    settled = {"pooled": request.pooled or not engine.heads, "clip": clip}
    settled["windows"] = request.windows or windows
    return Settled(**{**vars(request), **settled})


def list_reductions(artifact: Artifact, request: Settled) -> list[str]:
    """What a request leaves out of an artifact, in words."""
    engine, recipe, rotations = find_engine(request.engine), artifact.recipe, artifact.rotations
    dropped = " and ".join(f"{side}s" for side in dropped_means(artifact, request))
    ratios = "/".join(f"{ratio:g}" for ratio in request.clip)
    clips_alike = distinct_clips(rotations) == tuple([ratio] for ratio in request.clip)
    clips_otherwise = engine.clip != "head" and not clips_alike
    chosen, own = "/".join(map(str, request.windows)), f"{recipe.sink}/{recipe.recent}"
    lost = {
        "rotations: only the bits of each layer are written": not engine.rotates,
        "one rotation per layer instead of one per KV head": request.pooled and rotations.per_head,
        f"{dropped} that keep their mean": dropped,
        f"clip ratios {ratios} instead of the artifact's own": clips_otherwise,
        f"windows {chosen} instead of {own}": chosen != own,
        "nearest codes instead of transform coding": (
            rotations.has_transform and not engine.budget
        ),
    }
    return [words for words, applies in lost.items() if applies]


def describe_losses(name: str, artifacts: Iterable[Artifact]) -> str:
    """What an engine leaves out of artifacts, in one line."""
    lost: dict[str, None] = {}
    for artifact in artifacts:
        lost |= dict.fromkeys(list_reductions(artifact, settle_request(artifact, Request(name))))
    return f"Lost for {name}: {'; '.join(lost) or 'nothing'}"


# ---- pooling: one rotation per layer, of an artifact with one per KV head


def check_pooled(artifacts: Sequence[Artifact]) -> None:
    """Raise `UsageError` if no artifact has a rotation per KV head, and `RotationZooError` if one
    that has lacks the statistics."""
    per_head = [artifact for artifact in artifacts if artifact.rotations.per_head]
    if not per_head:
        problem = "--pooled is for artifacts with one rotation per KV head, and none is given"
        raise UsageError(problem, "leave it out")
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
    """One rotation per layer, fitted from the statistics of an artifact: a mean of rotations would
    not be orthogonal. Raises as `check_pooled`."""
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
    """The rotations of an artifact as `reduce_rotations` makes them, one per layer if `pooled`.
    Raises as `check_pooled` and `spend_bits`."""
    rotations = artifact.rotations
    if pooled and rotations.per_head:
        # Only engines without a budget of bits take one rotation per layer.
        rotations, budget = pooled_rotations(artifact), None
    return reduce_rotations(rotations, uncentered, budget)
