"""Reductions: what an export leaves out of an artifact because its engine does not take it."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from rotationzoo.artifact.store import Artifact
from rotationzoo.codec.engine_needs import check_sides, choose_format, find_engine
from rotationzoo.engines.payload import Request, Settled, distinct_clips, dropped_means
from rotationzoo.errors import UsageError
from rotationzoo.sides import HEADS

_PICKED = ("format", "rounding", "windows", "sink", "recent", "pooled", "prefill_layout")
"""What `--for` picks of a cache, in the words of the options that come before it."""


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
    chosen = {"pooled": request.pooled or not engine.heads, "clip": clip}
    return Settled(**{**vars(request), **chosen, "windows": request.windows or windows})


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


def choose_measures(
    name: str, artifacts: Iterable[Artifact], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """The settings of an evaluation that measures what an engine serves of artifacts; `settings`
    are the user's own. Raises `UsageError` for an engine whose codec is not simulated."""
    engine, artifacts = find_engine(name), list(artifacts)
    has_budget = any(artifact.rotations.has_budget for artifact in artifacts)
    chosen: dict[str, Any] = {
        "engine": name,
        "format": choose_format(name, has_budget),
        "uncentered": engine.uncentered,
        "pooled": not engine.heads and any(each.rotations.per_head for each in artifacts),
        "notes": [describe_choice(name, artifacts, settings)],
    }
    if not engine.sliding:
        chosen["leaves_windows"] = True
    if not engine.feedback:
        chosen["rounding"] = "nearest"
    if not engine.windows:
        chosen["windows"] = [(0, 0)]
    if settings.get("prefill_chunk"):
        chosen["prefill_layout"] = engine.prefill_layout
    return chosen
