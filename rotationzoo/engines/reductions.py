"""Reductions: what an export leaves out of an artifact because an engine cannot serve it, and what
else it needs.

Each has a flag, by which the user agrees to it or names what is missing.
"""

import itertools
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rotationzoo.artifact.store import Artifact
from rotationzoo.artifact.weights import model_words
from rotationzoo.engines.base import Capabilities
from rotationzoo.engines.payload import Clips, Request, dropped_means, requested_clips
from rotationzoo.engines.registry import ENGINES
from rotationzoo.errors import RotationZooError

_CLIP_WORDS = {
    "one": "a single clip ratio",
    "side": "one clip ratio for all keys and one for all values",
}


@dataclass(frozen=True)
class _Reduction:
    """One thing that may be left out of what the engine receives."""

    needed: bool
    """Whether the engine cannot serve it, or the user does not want it."""
    agreed: bool
    words: str
    flag: str = ""
    """The flag to suggest if the reduction is needed and the user has not agreed."""


def agreed_reductions(
    artifact: Artifact, request: Request, capabilities: Capabilities, clips: Clips
) -> list[str]:
    """The reductions of this export, in words.

    Raises `RotationZooError`, with the whole command, for what the engine cannot serve and the
    request does not leave out, and for what the engine needs and the request does not name.
    """
    rows = itertools.chain(
        _base(request),
        _pooling(artifact, request, capabilities),
        _means(artifact, request, capabilities),
        _clip_ratios(artifact, request, capabilities, clips),
        _windows(artifact, request, capabilities),
    )
    needed = [row for row in rows if row.needed]
    refused = [row for row in needed if not row.agreed]
    if not refused:
        return [row.words for row in needed]
    flags = dict(row.flag.partition(" ")[::2] for row in refused)
    wanted = ", ".join(f"{row.words} ({row.flag.split()[0]})" for row in refused)
    hint = f"with all of that: {_command(artifact, request, flags)}"
    if released := released_way(artifact, request.engine):
        hint = f"{released}; for its pull request, {hint}"
    raise RotationZooError(
        f"{request.engine} cannot serve {artifact.folder} as it is, only with {wanted}", hint=hint
    )


def released_way(artifact: Artifact, engine: str) -> str:
    """How a released version of the engine serves the artifact, with the whole command. Empty if
    none does."""
    words = ["rotationzoo", "serve", *model_words(artifact), "--rotations", str(artifact.folder)]
    released = ENGINES[engine].released
    return released and f"{released}: {shlex.join(words)}"


def _command(artifact: Artifact, request: Request, flags: dict[str, str]) -> str:
    """The command that exports as requested with more flags: name -> value, empty for a switch."""
    options = request.options
    given: dict[str, Path | str | bool | None] = {
        "--output": request.output,
        "--pooled": request.pooled,
        "--uncentered": request.uncentered,
        "--clip": request.clip and _pair(request.clip),
        "--windows": request.windows and _window(request.windows),
        "--absorbed": request.absorbed,
        "--base": options.base,
        "--engine-hadamard": options.engine_hadamard,
        "--model": options.model,
    }
    chosen = {name: value for name, value in given.items() if value} | flags
    words = ["rotationzoo", "export", str(artifact.folder), "--to", request.engine]
    for name, value in chosen.items():
        words += [name] if value in (True, "") else [name, str(value)]
    return shlex.join(words)


def _base(request: Request) -> Iterator[_Reduction]:
    yield _Reduction(
        needed=ENGINES[request.engine].needs_base and request.options.base is None,
        agreed=False,
        words="a GGUF file of the model, which is copied",
        flag="--base MODEL.gguf",
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
    """The means to leave out. An engine that does not subtract them needs no flag: rotations are
    the same without them, and attention too."""
    dropped = dropped_means(artifact, request, capabilities.mean)
    sides = " and ".join(f"{side}s" for side in dropped)
    yield _Reduction(needed=bool(dropped), agreed=True, words=f"{sides} that keep their mean")


def _clip_ratios(
    artifact: Artifact, request: Request, capabilities: Capabilities, clips: Clips
) -> Iterator[_Reduction]:
    keys, values = clips
    fits = len(keys) == len(values) == 1 and (capabilities.clip == "side" or keys == values)
    if request.clip is not None:
        words = f"clip ratios {_pair(request.clip)} instead of the artifact's own"
        unchanged = clips == requested_clips(artifact.rotations, replace(request, clip=None))
        yield _Reduction(needed=fits and not unchanged, agreed=True, words=words)
    # Suggest the highest ratio, which clips least. Lower ones were chosen for heads that tolerate
    # them, and other heads may not.
    highest = max(keys), max(values)
    ratios = f"{highest[0]:g}" if capabilities.clip == "one" else _pair(highest)
    yield _Reduction(
        needed=not fits,
        agreed=False,
        words=_CLIP_WORDS[capabilities.clip],
        flag=f"--clip {ratios}",
    )


def _pair(ratios: tuple[float, float]) -> str:
    return f"{ratios[0]:g}/{ratios[1]:g}"


def _windows(
    artifact: Artifact, request: Request, capabilities: Capabilities
) -> Iterator[_Reduction]:
    of_artifact = (artifact.recipe.sink, artifact.recipe.recent)
    windows = request.windows or of_artifact
    yield _Reduction(
        needed=not capabilities.windows and windows != (0, 0),
        agreed=False,
        words="no tokens kept exact",
        flag="--windows 0/0",
    )
    yield _Reduction(
        needed=windows != of_artifact,
        agreed=True,
        words=f"windows {_window(windows)} instead of {_window(of_artifact)}",
    )


def _window(windows: tuple[int, int]) -> str:
    return f"{windows[0]}/{windows[1]}"
