"""What an export leaves out of an artifact: a row for everything that an engine may not serve, with
the flag by which the user agrees."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rotationzoo.artifact.store import Artifact
from rotationzoo.engines.base import Capabilities
from rotationzoo.engines.payload import Clips, Request, requested_clips
from rotationzoo.errors import RotationZooError

_CHOSEN = (
    ", for which a search chose its rotations: with higher ones they can be far worse than others"
)


@dataclass(frozen=True)
class _Reduction:
    """Something that the engine does not get."""

    needed: bool
    """Whether the engine cannot serve it, or the user does not want it."""
    agreed: bool
    words: str
    flag: str = ""
    """What to add where it is needed and nobody has agreed."""


def agreed_reductions(
    artifact: Artifact, request: Request, capabilities: Capabilities, clips: Clips
) -> list[str]:
    """What is left out, in words. Raises `RotationZooError`, with the flags, for what the request
    does not leave out and the engine cannot serve."""
    searched = artifact.manifest.search is not None
    rows = itertools.chain(
        _pooling(artifact, request, capabilities),
        _means(artifact, request, capabilities),
        _clip_ratios(artifact, request, capabilities, clips),
        _windows(artifact, request, capabilities),
    )
    needed = [row for row in rows if row.needed]
    refused = [row for row in needed if not row.agreed]
    if not refused:
        return [row.words for row in needed]
    flags = [row.flag for row in refused]
    wanted = ", ".join(f"{row.words} ({row.flag.split()[0]})" for row in refused)
    hint = f"to accept that, add: {' '.join(flags)}"
    if searched and "--uncentered" in flags:
        hint += "; made for such engines: --recipe best-uncentered"
    raise RotationZooError(
        f"{request.engine} cannot serve {artifact.folder} as it is, only with {wanted}", hint=hint
    )


def _pooling(
    artifact: Artifact, request: Request, capabilities: Capabilities
) -> Iterator[_Reduction]:
    yield _Reduction(
        needed=artifact.rotations.per_head and (request.pooled or not capabilities.heads),
        agreed=request.pooled,
        words="one rotation per layer instead of one per KV head",
        flag="--pooled",
    )


def _means(
    artifact: Artifact, request: Request, capabilities: Capabilities
) -> Iterator[_Reduction]:
    """No engine subtracts a mean from values."""
    dropped = [
        side
        for side in artifact.recipe.centered
        if request.uncentered or side == "value" or not capabilities.mean
    ]
    sides = " and ".join(f"{side}s" for side in dropped)
    yield _Reduction(
        needed=bool(dropped),
        agreed=request.uncentered,
        words=f"{sides} that keep their mean",
        flag="--uncentered",
    )


def _clip_ratios(
    artifact: Artifact, request: Request, capabilities: Capabilities, clips: Clips
) -> Iterator[_Reduction]:
    keys, values = ({ratio for sides in clips.values() for ratio in sides[i]} for i in (0, 1))
    highest_key, highest_value = max(keys), max(values)
    pair = f"{highest_key:g}/{highest_value:g}"
    one_a_layer = all(len(ratios) == 1 for sides in clips.values() for ratios in sides)
    # How many ratios the engine can have -> whether these are no more, words, ratios to accept.
    fits, words, ratios = {
        "one": (len(keys | values) == 1, "a single clip ratio", f"{highest_key:g}"),
        "side": (
            len(keys) == len(values) == 1,
            "one clip ratio for all keys and one for all values",
            pair,
        ),
        "layer": (one_a_layer, "one a layer", pair),
    }[capabilities.clip]
    if request.clip is not None:
        words_of_request = f"clip ratios {request.clip[0]:g}/{request.clip[1]:g} instead of the "
        words_of_request += "artifact's own"
        if artifact.manifest.search is not None:
            words_of_request += _CHOSEN
        unchanged = clips == requested_clips(artifact.rotations, replace(request, clip=None))
        yield _Reduction(needed=fits and not unchanged, agreed=True, words=words_of_request)
    yield _Reduction(needed=not fits, agreed=False, words=words, flag=f"--clip {ratios}")


def _windows(
    artifact: Artifact, request: Request, capabilities: Capabilities
) -> Iterator[_Reduction]:
    own = (artifact.recipe.sink, artifact.recipe.recent)
    windows = request.windows or own
    yield _Reduction(
        needed=not capabilities.windows and windows != (0, 0),
        agreed=False,
        words="no tokens kept exact",
        flag="--windows 0/0",
    )
    yield _Reduction(
        needed=windows != own,
        agreed=True,
        words=f"windows {windows[0]}/{windows[1]} instead of {own[0]}/{own[1]}",
    )
