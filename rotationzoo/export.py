"""An artifact -> a folder of files that one serving engine reads, with the command that starts it."""

import json
import os
import shlex
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from rotationzoo.artifact import Artifact, disk_errors, sha256, temporary_sibling
from rotationzoo.engines import SIDES, Launch, Options, Serving, Side, Takes, gguf, mlx, onnx, sglang, vllm
from rotationzoo.errors import RotationZooError
from rotationzoo.fit import fit
from rotationzoo.geometry import Geometry, cached_layers, geometry_from_json
from rotationzoo.moments import from_tensors
from rotationzoo.recipe import Recipe
from rotationzoo.rotation import GIVEN


class Engine(Protocol):
    """What each module in `engines` is."""

    NAME: str
    TAKES: Takes

    def check(self, geometry: Geometry, serving: Serving) -> None: ...
    def write(self, work: Path, final: Path, serving: Serving, options: Options) -> Launch: ...


ENGINES = {module.NAME: cast(Engine, module) for module in (sglang, vllm, gguf, mlx, onnx)}
RECORD = "export.json"


@dataclass(frozen=True)
class Request:
    """What the user asks for and agrees to. `clip` (ratios of keys and of values) and `windows` (sink and recent tokens)
    replace the artifact's own."""

    engine: str
    output: Path | None = None
    pooled: bool = False
    uncentered: bool = False
    clip: tuple[float, float] | None = None
    windows: tuple[int, int] | None = None
    values_absorbed: bool = False
    options: Options = field(default_factory=Options)


@dataclass(frozen=True)
class Exported:
    """`files` is name -> sha256; `reduced` says what the engine does not get, in words."""

    engine: str
    path: Path
    files: dict[str, str]
    launch: Launch
    reduced: list[str]


def export(there: Artifact, request: Request) -> Exported:
    """Write the files of one engine. Raises `RotationZooError` for what it cannot honour and the request does not reduce."""
    engine = ENGINES[request.engine]
    recipe = Recipe.model_validate(there.manifest["recipe"])
    geometry = geometry_from_json(there.manifest["geometry"])
    tensors = there.rotations()
    clips = _clips(tensors, geometry, request)
    reduced = _reductions(there, request, engine.TAKES, recipe, geometry, tensors, clips)
    if request.pooled and _per_head(tensors, geometry):
        tensors = _pooled(there, recipe, geometry)
    sink, recent = request.windows or (recipe.sink, recipe.recent)
    key, value = (_side(there, tensors, recipe, geometry, side, request) for side in SIDES)
    serving = Serving(
        model=there.manifest["model"]["id"] if there.bound else None,
        geometry=geometry,
        key=key,
        value=None if request.values_absorbed else value,
        clips={layer: (keys[0], values[0]) for layer, (keys, values) in clips.items()},
        group_size=recipe.group_size,
        sink=sink,
        recent=recent,
        provenance=_provenance(there, recipe, request),
    )
    engine.check(geometry, serving)
    target = request.output or Path("exports") / f"{there.folder.resolve().name}-{request.engine}"
    _check_target(target)
    with disk_errors(target), temporary_sibling(target.absolute()) as work:
        launch = engine.write(work, target.absolute(), serving, request.options)
        files = {path.name: sha256(path) for path in sorted(work.iterdir())}
        done = Exported(request.engine, target, files, launch, reduced)
        record = as_json(done) | {"artifact": there.identity}
        (work / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        _install(work, target, request.engine, launch)
    return done


def as_json(done: Exported) -> dict[str, Any]:
    return {
        "engine": done.engine, "path": str(done.path), "files": done.files, "command": done.launch.command,
        "environment": done.launch.environment, "notes": done.launch.notes, "reduced": done.reduced,
    }  # fmt: skip


def launch_line(launch: Launch) -> str:
    """The command with its environment, to paste into a shell."""
    variables = "".join(f"{name}={shlex.quote(value)} \\\n" for name, value in launch.environment.items())
    return variables + "\n".join(launch.command)


Clips = Mapping[int, tuple[list[float], list[float]]]
"""Layer -> the different clip ratios of its heads, of keys and of values."""


def _clips(tensors: Mapping[str, torch.Tensor], geometry: Geometry, request: Request) -> Clips:
    found = {}
    for layer in cached_layers(geometry):
        keys, values = (sorted(set(tensors[f"layers.{layer.index}.{side}.clip"].tolist())) for side in SIDES)
        found[layer.index] = ([request.clip[0]], [request.clip[1]]) if request.clip else (keys, values)
    return found


def _reductions(
    there: Artifact,
    request: Request,
    takes: Takes,
    recipe: Recipe,
    geometry: Geometry,
    tensors: Mapping[str, torch.Tensor],
    clips: Clips,
) -> list[str]:
    """What is left out as the request says. Raises `RotationZooError`, with the whole command, for what it does not say."""
    reduced, refused, flags = [], [], []

    def reduce(needed: bool, agreed: bool, what: str, flag: str) -> None:
        if needed and agreed:
            reduced.append(what)
        elif needed:
            refused.append(what)
            flags.append(flag)

    per_head = _per_head(tensors, geometry)
    reduce(
        per_head and (request.pooled or not takes.heads), request.pooled, "one rotation per layer instead of one per KV head",
        "--pooled",
    )  # fmt: skip
    reduce(
        recipe.center_keys and (request.uncentered or not takes.mean),
        request.uncentered,
        "keys that keep their mean",
        "--uncentered",
    )
    keys, values = ({ratio for pair in clips.values() for ratio in pair[side]} for side in (0, 1))
    single = {
        "one": len(keys | values) == 1,
        "side": len(keys) == len(values) == 1,
        "layer": all(len(ratios) == 1 for pair in clips.values() for ratios in pair),
    }[takes.clip]
    words = {"one": "a single clip ratio", "side": "one clip ratio for all keys and one for all values", "layer": "one a layer"}
    own = f"{max(keys):g}" if takes.clip == "one" else f"{max(keys):g}/{max(values):g}"
    if request.clip and single:
        given = f"clip ratios {request.clip[0]:g}/{request.clip[1]:g} instead of the artifact's own"
        reduced += [given] if request.clip != (recipe.key_clip, recipe.value_clip) else []
    reduce(not single, False, words[takes.clip], f"--clip {own}")
    windows = request.windows or (recipe.sink, recipe.recent)
    reduce(not takes.windows and windows != (0, 0), False, "no tokens kept exact", "--windows 0/0")
    if request.windows and request.windows != (recipe.sink, recipe.recent):
        reduced.append(f"windows {windows[0]}/{windows[1]} instead of {recipe.sink}/{recipe.recent}")
    if refused:
        agreed = [flag for flag in ("--pooled", "--uncentered") if getattr(request, flag[2:])]
        base = ["--base MODEL.gguf"] if request.engine == gguf.NAME else []
        command = " ".join(["rotationzoo export", str(there.folder), "--to", request.engine, *base, *agreed, *flags])
        raise RotationZooError(
            f"{request.engine} cannot serve {there.folder} as it is, only with {', '.join(refused)}",
            hint=f"accept that with: {command}",
        )
    return reduced


def _per_head(tensors: Mapping[str, torch.Tensor], geometry: Geometry) -> bool:
    return any(len(tensors[f"layers.{layer.index}.{side}.rotation"]) > 1 for layer in cached_layers(geometry) for side in SIDES)


def _pooled(there: Artifact, recipe: Recipe, geometry: Geometry) -> dict[str, torch.Tensor]:
    """Rotations fitted from the statistics pooled over heads; the mean of rotations would be no rotation."""
    statistics = there.statistics()
    if recipe.composition == GIVEN or (recipe.needs_statistics and statistics is None):
        raise RotationZooError(
            f"{there.folder} cannot be pooled: it has no statistics to fit one rotation per layer from",
            hint="fetch it with its statistics, or make one with: rotationzoo calibrate MODEL",
        )
    pooled = recipe.model_copy(update={"pooling": "layer"})
    return fit(None if statistics is None else from_tensors(statistics), pooled, geometry)


def _side(
    there: Artifact, tensors: Mapping[str, torch.Tensor], recipe: Recipe, geometry: Geometry, side: str, request: Request
) -> Side:
    def of(kind: str) -> dict[int, torch.Tensor]:
        names = {layer.index: f"layers.{layer.index}.{side}.{kind}" for layer in cached_layers(geometry)}
        return {layer: tensors[name] for layer, name in names.items() if name in tensors}

    rotation, eigenvalues = of("rotation"), of("eigenvalues")
    if all(len(matrix) == 1 for matrix in rotation.values()):
        rotation = {layer: matrix[0] for layer, matrix in rotation.items()}
        eigenvalues = {layer: values[0] for layer, values in eigenvalues.items()}
    mean = of("mean") if not request.uncentered else {}
    imported = there.manifest.get("imported")
    if imported and not request.pooled:
        return Side(rotation, imported["objectives"][side], eigenvalues, mean)
    return Side(rotation, objective(recipe, side), eigenvalues, mean)


def objective(recipe: Recipe, side: str) -> str:
    """Statistic and composition in the words of OSCAR's files; which V^T S^T S V it was is in the provenance."""
    if not recipe.has_eigenbasis:
        return recipe.composition
    words = {"query": "qqt", "key": "ktk", "output": "sst", "key_energy": "sst", "value": "vtv"}
    return f"{words[recipe.key_statistic if side == 'key' else recipe.value_statistic]}_{recipe.composition}"


def _provenance(there: Artifact, recipe: Recipe, request: Request) -> dict[str, str | int | float | bool]:
    """Primitives alone, so that a `.pt` file loads without running anything. Of imported files what they said themselves."""
    manifest = there.manifest
    if "imported" in manifest:
        return dict(manifest["imported"]["calibration"])
    model, data = manifest["model"], manifest["calibration"] or {}
    found = {
        "fitter": f"rotationzoo {manifest['versions']['rotationzoo']}", "generation_id": there.identity[:32],
        "model": model["id"], "model_revision": model["revision"], "config_sha256": model["config_sha256"],
        "weights_fingerprint": model["weights_fingerprint"], "recipe": recipe.name, "recipe_sha256": manifest["recipe_sha256"],
        "key_statistic": recipe.key_statistic, "value_statistic": recipe.value_statistic, "composition": recipe.composition,
        "pooling": "layer" if request.pooled else recipe.pooling, "tokens": data.get("tokens"),
        "text_sha256": data.get("fingerprint"), "post_rope": True, "accumulator_dtype": "float64",
    }  # fmt: skip
    return {name: value for name, value in found.items() if value is not None}


def _check_target(target: Path) -> None:
    """Nothing of somebody else's is replaced."""
    if target.exists() and not (target / RECORD).is_file() and (not target.is_dir() or any(target.iterdir())):
        raise RotationZooError(f"{target} exists and holds other files", hint="choose another place with --output")


def _install(work: Path, target: Path, engine: str, launch: Launch) -> None:
    """Put all files in place: a new folder at once, an earlier export file by file, its record last."""
    if not target.exists():
        work.rename(target)
        return
    try:
        earlier = json.loads((target / RECORD).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError):
        earlier = {}
    with ExitStack() as stack:
        if engine == sglang.NAME:
            stack.enter_context(sglang.replacing(launch.environment))
        names = sorted((path.name for path in work.iterdir()), key=lambda name: name == RECORD)
        for name in names:
            os.replace(work / name, target / name)
        for name in earlier:
            if name not in names:
                (target / name).unlink(missing_ok=True)
