"""An artifact -> a folder of files that one serving engine reads, with the command that starts
it."""

import shlex
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast

from rotationzoo.artifact.store import Artifact
from rotationzoo.checks.verify import verify
from rotationzoo.engines.base import SIDES, Capabilities, Launch, Options, Payload
from rotationzoo.engines.formats import llama_cpp, mlx, onnx, sglang, vllm
from rotationzoo.engines.payload import PLACEHOLDER, Clips, Request, assemble
from rotationzoo.errors import RotationZooError
from rotationzoo.model.geometry import Geometry
from rotationzoo.rotations import Rotations
from rotationzoo.storage import strict_json
from rotationzoo.storage.files import disk_errors, regular_file, sha256, size_of, write_new
from rotationzoo.storage.folders import carry_over, check_name, install, recover, temporary_sibling


class Engine(Protocol):
    """What each module in `engines` is."""

    NAME: str
    CAPABILITIES: Capabilities

    def check(self, geometry: Geometry, serving: Payload) -> None: ...
    def write(self, work: Path, final: Path, serving: Payload, options: Options) -> Launch: ...


ENGINES = {module.NAME: cast(Engine, module) for module in (sglang, vllm, llama_cpp, mlx, onnx)}
RECORD = "export.json"
_CHOSEN = (
    ", for which a search chose its rotations: with higher ones they can be far worse than others"
)
_UNTRIED = (
    "nobody has tried whether the model's attention ignores the key mean, which is subtracted and never added back: with "
    "learned sinks or a soft cap it does not, and --uncentered leaves it out"
)
ABSORBED = "rotationzoo.json"
"""What `absorb` leaves in the model that it writes."""


@dataclass(frozen=True)
class Exported:
    """`files` is name -> sha256; `reduced` says what the engine does not get, in words."""

    engine: str
    path: Path
    files: dict[str, str]
    launch: Launch
    reduced: list[str]


def export(artifact: Artifact, request: Request) -> Exported:
    """Write the files of one engine. Raises `RotationZooError` for what it cannot honour and the
    request does not reduce."""
    engine = ENGINES[request.engine]
    if problems := verify(artifact).problems:
        raise RotationZooError(
            f"{artifact.folder} is not exported: {problems[0]}",
            hint=f"see: rotationzoo verify {shlex.quote(str(artifact.folder))}",
        )
    geometry = artifact.geometry
    absorbed = _absorbed_model(artifact, request)
    clips = _clips(artifact.rotations, request)
    reduced = _reductions(artifact, request, engine.CAPABILITIES, clips)
    serving = assemble(artifact, request, clips, absorbed)
    engine.check(geometry, serving)
    untried = bool(serving.key.mean) and any(layer.shift_invariant is None for layer in geometry)
    target = (
        request.output or Path("exports") / f"{artifact.folder.resolve().name}-{request.engine}"
    )
    recover(target)
    _check_target(target)
    with disk_errors(target), temporary_sibling(target) as work:
        launch = engine.write(work, target.absolute(), serving, request.options)
        words = [word for line in launch.command for word in line.split()]
        stands_for = f"{PLACEHOLDER} in the command stands for {artifact.manifest.model.id}: put its folder or hub id there"
        notes = ([_UNTRIED] if untried else []) + ([stands_for] if PLACEHOLDER in words else [])
        launch = replace(launch, notes=[*launch.notes, *notes])
        files = {path.name: sha256(path) for path in sorted(work.iterdir())}
        done = Exported(request.engine, target, files, launch, reduced)
        record = as_json(done) | {"artifact": artifact.identity}
        write_new(work / RECORD, strict_json.text(record))
        for path in work.iterdir():
            path.chmod(
                0o644
                # safetensors makes files that only their owner can read, and servers have users of
                # their own
            )
        _check_target(target)  # what was made took time
        with sglang.alone(launch.environment) if request.engine == sglang.NAME else nullcontext():
            _install(work, target)
    return done


def as_json(done: Exported) -> dict[str, Any]:
    return {
        "engine": done.engine, "path": str(done.path), "files": done.files, "command": done.launch.command,
        "environment": done.launch.environment, "notes": done.launch.notes, "reduced": done.reduced,
    }  # fmt: skip


def launch_line(launch: Launch) -> str:
    """The command with its environment, to paste into a shell."""
    variables = "".join(
        f"{name}={shlex.quote(value)} \\\n" for name, value in launch.environment.items()
    )
    return variables + "\n".join(launch.command)


def _clips(rotations: Rotations, request: Request) -> Clips:
    clips = {}
    for layer, sides in rotations.items():
        keys, values = (sorted(set(sides[side].clip.tolist())) for side in SIDES)
        clips[layer] = ([request.clip[0]], [request.clip[1]]) if request.clip else (keys, values)
    return clips


def _reductions(
    artifact: Artifact,
    request: Request,
    takes: Capabilities,
    clips: Clips,
) -> list[str]:
    """What is left out as the request says. Raises `RotationZooError`, with the flags, for what it
    does not say."""
    recipe, searched = artifact.recipe, artifact.manifest.search is not None
    reduced: list[str] = []
    refused: list[tuple[str, str]] = []

    def reduce(needed: bool, agreed: bool, what: str, flag: str) -> None:
        if needed and agreed:
            reduced.append(what)
        elif needed:
            refused.append((what, flag))

    shared = "one rotation per layer instead of one per KV head"
    reduce(
        artifact.rotations.per_head and (request.pooled or not takes.heads),
        request.pooled,
        shared,
        "--pooled",
    )
    drops = [
        side for side in recipe.centered if request.uncentered or side == "value" or not takes.mean
    ]
    reduce(
        bool(drops),
        request.uncentered,
        " and ".join(f"{side}s" for side in drops) + " that keep their mean",
        "--uncentered",
    )
    keys, values = ({ratio for pair in clips.values() for ratio in pair[side]} for side in (0, 1))
    single = {
        "one": len(keys | values) == 1,
        "side": len(keys) == len(values) == 1,
        "layer": all(len(ratios) == 1 for pair in clips.values() for ratios in pair),
    }[takes.clip]
    words = {
        "one": "a single clip ratio",
        "side": "one clip ratio for all keys and one for all values",
        "layer": "one a layer",
    }
    own = f"{max(keys):g}" if takes.clip == "one" else f"{max(keys):g}/{max(values):g}"
    if request.clip and single:
        given = f"clip ratios {request.clip[0]:g}/{request.clip[1]:g} instead of the artifact's own"
        given += _CHOSEN if searched else ""
        reduced += (
            [given] if clips != _clips(artifact.rotations, replace(request, clip=None)) else []
        )
    reduce(not single, False, words[takes.clip], f"--clip {own}")
    windows = request.windows or (recipe.sink, recipe.recent)
    reduce(not takes.windows and windows != (0, 0), False, "no tokens kept exact", "--windows 0/0")
    if request.windows and request.windows != (recipe.sink, recipe.recent):
        reduced.append(
            f"windows {windows[0]}/{windows[1]} instead of {recipe.sink}/{recipe.recent}"
        )
    if refused:
        wanted = ", ".join(f"{what} ({flag.split()[0]})" for what, flag in refused)
        better = (
            "; made for such engines: --recipe best-uncentered"
            if searched and drops and not request.uncentered
            else ""
        )
        raise RotationZooError(
            f"{request.engine} cannot serve {artifact.folder} as it is, only with {wanted}",
            hint=f"to accept that, add: {' '.join(flag for _, flag in refused)}{better}",
        )
    return reduced


def _absorbed_model(artifact: Artifact, request: Request) -> str | None:
    """The model whose weights carry the value rotation of this very artifact."""
    if request.values_absorbed is None:
        return None
    folder = request.values_absorbed
    if size_of(folder / ABSORBED) is None:
        raise RotationZooError(
            f"{folder} is no model with an absorbed value rotation: it has no {ABSORBED}",
            hint=f"make one with: rotationzoo export {shlex.quote(str(artifact.folder))} --absorb-values MODEL",
        )
    record = strict_json.read(folder / ABSORBED)
    if not isinstance(record, dict) or record.get("artifact") != artifact.identity:
        raise RotationZooError(
            f"{folder} carries the value rotation of another artifact", hint="export that one"
        )
    return str(folder.absolute())


def _check_target(target: Path) -> None:
    """Nothing of somebody else's is replaced."""
    check_name(target)
    empty = not target.exists() or (target.is_dir() and not any(target.iterdir()))
    if not empty and size_of(target / RECORD) is None:
        raise RotationZooError(
            f"{target} exists and holds other files", hint="choose another place with --output"
        )


def _install(work: Path, target: Path) -> None:
    """Put the folder in place, with what else is in an earlier one: engines find the files of one
    export, never of two."""
    if target.is_dir():
        written = {path.name for path in work.iterdir()}
        carry_over(target, work, {*written, *_earlier(target), *sglang.old_markers(target)})
    install(work, target)


def _earlier(target: Path) -> list[str]:
    """Names of the files that the earlier export wrote and nobody has changed since: who wrote the
    record is not known."""
    try:
        record = strict_json.validate(
            _Record, strict_json.read(target / RECORD), str(target / RECORD)
        )
    except RotationZooError:
        return []
    names = []
    for name, known in record.files.items():
        with suppress(RotationZooError):
            if sha256(regular_file(target, name)) == known:
                names.append(name)
    return names


class _Record(strict_json.Strict):
    """`export.json`, as far as a later export asks it."""

    files: dict[str, str]
