"""Reductions: what is left out of an artifact because its engine does not take it."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from rotationzoo.artifact.store import Artifact
from rotationzoo.codec.engine_needs import check_sides, choose_format, find_engine
from rotationzoo.errors import UsageError
from rotationzoo.rotations import SIDES, Rotations
from rotationzoo.sides import EVERY_SIDE, HEADS

_PICKED = ("format", "rounding", "windows", "sink", "recent", "pooled", "prefill_layout")
"""What `--for` picks of a cache, in the words of the options that come before it."""


@dataclass(frozen=True)
class Request:
    """The settings of one export, as the user gave them, including what may be left out."""

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
    model: str | None = None
    """llama.cpp: the model that the base was converted from, to compare the two. By default it is
    the artifact's own model, if that is in the hub's cache."""


@dataclass(frozen=True)
class Settled(Request):
    """A request that leaves nothing open."""

    clip: tuple[float, float] = (1.0, 1.0)
    windows: tuple[int, int] = (0, 0)


def distinct_clips(rotations: Rotations) -> tuple[list[float], ...]:
    """The distinct clip ratios of all that is read as keys, and as values, ascending."""
    ratios: dict[str, set[float]] = {side: set() for side in SIDES}
    for layer in rotations.values():
        for side in SIDES:
            ratios[side].update(layer[side].clip.tolist())
    return tuple(sorted(ratios[side]) for side in SIDES)


def dropped_means(artifact: Artifact, request: Request) -> list[str]:
    """The sides whose means are left out: the engine does not subtract them, or the user does not
    want them."""
    kept = () if request.uncentered else find_engine(request.engine).means
    mine = [side for side in EVERY_SIDE if side in artifact.rotations.sides]
    return [side for side in mine if artifact.recipe.centers(side) and side not in kept]


def settle_request(artifact: Artifact, request: Request) -> Settled:
    """The request with everything that the user did not choose: one rotation per layer, clip ratios
    and windows as the engine takes them, and otherwise the artifact's own.

    Raises `UsageError` for a choice that the engine does not take.
    """
    engine = find_engine(request.engine)
    check_sides(request.engine, artifact.rotations.sides)
    windows = (artifact.recipe.sink, artifact.recipe.recent) if engine.windows else (0, 0)
    if not engine.windows and request.windows not in (None, windows):
        raise UsageError(f"{request.engine} keeps no tokens exact", hint="leave out --windows")
    # The highest ratio clips least. Lower ones were chosen for heads that tolerate them, and other
    # heads may not.
    keys, values = map(max, distinct_clips(artifact.rotations))
    if engine.clip == "none" and request.clip:
        raise UsageError(f"{request.engine} clips nothing", hint="leave out --clip")
    clip = (1.0, 1.0) if engine.clip == "none" else request.clip or (keys, values)
    if engine.clip == "one" and clip[0] != clip[1]:
        if request.clip:
            hint = f"--clip {max(clip):g}"
            raise UsageError(f"{request.engine} has a single clip ratio", hint)
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
        "nearest codes instead of error feedback": rotations.has_feedback and not engine.feedback,
        "the same bits for all layers instead of a budget": (
            rotations.has_budget and not engine.budget
        ),
    }
    return [words for words, applies in lost.items() if applies]


def describe_choice(
    name: str, artifacts: Iterable[Artifact], settings: Collection[str] = ()
) -> str:
    """What an engine makes of artifacts, in one line: what is picked for it, what it loses, and
    which of the user's `settings` come before that."""
    engine, codes, artifacts = find_engine(name), "nearest codes", list(artifacts)
    rotations = "a rotation per KV head" if engine.heads else "one rotation per layer"
    lost: dict[str, None] = {}
    for artifact in artifacts:
        if engine.feedback and artifact.rotations.has_feedback:
            codes = "error feedback"
        if (cached := artifact.rotations.cached) is not HEADS:
            rotations = f"a rotation of each layer's {cached.sides[0]}"
        lost |= dict.fromkeys(list_reductions(artifact, settle_request(artifact, Request(name))))
    has_budget = any(artifact.rotations.has_budget for artifact in artifacts)
    picked = f"{rotations}, {codes}, format {choose_format(name, has_budget)}"
    words = f"For {name}: {picked}. Lost: {'; '.join(lost) or 'nothing'}"
    instead = ", ".join(option for option in _PICKED if option in settings)
    return f"{words}. Chosen instead: {instead}" if instead else words
