"""Exports an artifact: the files that a serving engine reads, and the command that starts it. An
export replaces an earlier one as a whole, and no other files."""

import importlib
import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rotationzoo.artifact import reductions
from rotationzoo.artifact.reductions import Request, Settled, settle_request
from rotationzoo.artifact.store import EXPORT, Artifact
from rotationzoo.checks.verify import verify
from rotationzoo.codec.engine_needs import find_engine
from rotationzoo.engines.base import Launch, Payload, SideMatrices, WriteFiles
from rotationzoo.errors import RotationZooError, UsageError
from rotationzoo.model.source import find_model, model_words
from rotationzoo.rotations import SIDES, LayerRotations, Rotations
from rotationzoo.sides import rows_of
from rotationzoo.storage import folders, strict_json
from rotationzoo.storage.files import digest, disk_errors, regular_file, sha256
from rotationzoo.storage.folders import recover, write_new


class _Record(strict_json.Strict):
    """What a later export reads of `export.json`."""

    files: dict[str, str]  # name -> sha256


def _check_target(target: Path) -> None:
    """Raise `RotationZooError` if the target holds anything but an earlier export."""
    folders.check_name(target)
    if not target.exists():
        return
    others = {target.name}
    if target.is_dir():
        # SGLang's own calibration leaves marks in such files.
        marks = {path.name for path in target.glob(".oscar_*.json")}
        found = {path.name for path in target.iterdir()}
        others = found - marks - {EXPORT, *_earlier_files(target)}
    if others:
        hint = "choose another place with --output"
        raise RotationZooError(f"{target} exists and holds other files: {min(others)}", hint)


def _earlier_files(target: Path) -> list[str]:
    """The files of an earlier export. Anybody may write a record, so their hashes must match."""
    names = []
    with suppress(RotationZooError):
        content = strict_json.read(target / EXPORT)
        record = strict_json.validate(_Record, content, str(target / EXPORT))
        for name, hash_ in record.files.items():
            with suppress(RotationZooError):
                if sha256(regular_file(target, name)) == hash_:
                    names.append(name)
    return names


@dataclass(frozen=True)
class Exported:
    """A finished export."""

    engine: str
    path: Path
    files: dict[str, str]  # name -> sha256
    launch: Launch
    reduced: list[str]  # what was left out of the artifact, in words


def export(artifact: Artifact, request: Request) -> Exported:
    """Write the files of an engine, without what it does not take; nothing for an engine that
    reads artifacts themselves. Raises `RotationZooError` for what the engine cannot serve."""
    row = find_engine(request.engine)
    if row.command:
        return _start_of(artifact, request, row.command)
    settled = settle_request(artifact, request)
    module = importlib.import_module(f"rotationzoo.engines.formats.{row.module}")
    write_files: WriteFiles = module.write_files
    name = f"{artifact.folder.resolve().name}-{request.engine}"
    target = request.output or Path("exports") / name
    recover(target)  # a killed export may have set the previous folder aside
    _check_target(target)
    folders.check_writable(target)
    if problems := verify(artifact).problems:
        hint = f"see: rotationzoo verify {shlex.quote(str(artifact.folder))}"
        raise RotationZooError(f"{artifact.folder} is not exported: {problems[0]}", hint)
    reduced = reductions.list_reductions(artifact, settled)
    payload = assemble_payload(artifact, settled)
    with disk_errors(target), folders.temporary_sibling(target) as work:
        launch = write_files(work, target.absolute(), payload, settled)
        launch.notes.extend(_notes_of_artifact(artifact, launch))
        if settled.pooled and artifact.rotations.per_head:
            launch.notes.append(_describe_pooling(artifact, settled))
        files = {path.name: sha256(path) for path in sorted(work.iterdir())}
        exported = Exported(request.engine, target, files, launch, reduced)
        record = as_json(exported) | {"artifact": artifact.identity}
        write_new(work / EXPORT, strict_json.text(record))
        for path in work.iterdir():
            path.chmod(0o644)  # a server may run as another user
        _check_target(target)  # again: files may have appeared in the meantime
        folders.install(work, target)
    return exported


def _start_of(artifact: Artifact, request: Request, command: str) -> Exported:
    """How rotationzoo starts an engine that reads artifacts themselves."""
    if request != Request(request.engine):
        problem = f"{request.engine} reads the folder as it is, and nothing is written for it"
        hint = f"leave out all options but --for {request.engine}, or give another engine"
        raise UsageError(problem, hint)
    words = ["rotationzoo", command, *model_words(artifact), "--rotations", str(artifact.folder)]
    notes = [f"nothing is written: {request.engine} reads the folder itself"]
    if command == "serve":
        notes += ["vLLM must be installed: docs/vllm.md says which versions were tried"]
    launch = Launch([shlex.join(words)], {}, notes)
    reduced = reductions.list_reductions(artifact, settle_request(artifact, request))
    return Exported(request.engine, artifact.folder, {}, launch, reduced)


def as_json(exported: Exported) -> dict[str, Any]:
    """The object that `export --json` prints and `export.json` stores."""
    content = {**vars(exported), "path": str(exported.path), **vars(exported.launch)}
    order = "engine", "path", "files", *vars(exported.launch), "reduced"
    return {name: content[name] for name in order}


def launch_line(launch: Launch) -> str:
    """The command and its environment variables, ready to paste into a shell."""
    variables = [f"{name}={shlex.quote(value)} \\" for name, value in launch.environment.items()]
    return "\n".join([*variables, *launch.command])


def _describe_pooling(artifact: Artifact, request: Settled) -> str:
    """A note with the command that measures what one rotation per layer costs."""
    words = ["rotationzoo", "evaluate", *model_words(artifact), str(artifact.folder)]
    engine = find_engine(request.engine)
    if engine.format:
        words += ["--for", request.engine]
    if engine.heads or not engine.format:  # otherwise the engine implies it
        words.append("--pooled")
    sink, recent = request.windows
    if engine.windows and (sink, recent) != (artifact.recipe.sink, artifact.recipe.recent):
        words += ["--windows", f"{sink}/{recent}"]
    command = shlex.join([*words, "--save"])
    problem = "one rotation per layer makes some models useless"
    return f"{problem}; to measure what it costs this one: {command}"


def _notes_of_artifact(artifact: Artifact, launch: Launch) -> list[str]:
    """Notes for every engine."""
    notes = []
    if artifact.recipe.rope_scaling is not None:
        notes.append(
            f"calibrated with the rope scaling {artifact.recipe.rope_scaling}: the server must "
            "scale too, by rope_scaling in config.json, SGLang's --json-model-override-args, "
            "vLLM's --hf-overrides or llama.cpp's --rope-scaling"
        )
    if any(PLACEHOLDER in line.split() for line in launch.command):
        stands = f"{PLACEHOLDER} in the command stands for {artifact.manifest.model.id}"
        notes.append(f"{stands}: put its folder or hub id there")
    return notes


# ---- what an engine receives


# OSCAR's names of statistics. It has none for `output`, which our provenance states.
_WORDS = {"query": "qqt", "key": "ktk", "key_energy": "sst", "value": "vtv", "output": "sst"}
PLACEHOLDER = "MODEL"  # stands in a launch command for a model whose location is unknown
Provenance = dict[str, str | int | float | bool]  # a `.pt` file with these runs no code


def _provenance(
    artifact: Artifact, pools: bool, uncentered: bool, served: Provenance
) -> Provenance:
    """The origin of an export, and the `served` parameters."""
    # Both files of an export have one generation id, which an import compares. Artifacts and
    # reductions have different ones.
    reduction = f"{artifact.identity} {pools} {uncentered} False"  # as in earlier exports
    generation = digest(reduction.encode())[:32]
    pooling = "layer" if pools else artifact.recipe.pooling
    manifest, recipe = artifact.manifest, artifact.recipe
    if manifest.imported is not None:
        stated = dict(manifest.imported.calibration)
        if pools or uncentered:
            stated |= {"pooling": pooling, "generation_id": generation}
        # If the imported files stated nothing, the exported ones state nothing either.
        return {**stated, **served} if manifest.imported.calibration else {}
    model, data = manifest.model, manifest.calibration
    tokens, text_sha256 = (data.tokens, data.fingerprint) if data else (None, None)
    entries: dict[str, str | int | bool | None] = {
        "fitter": f"rotationzoo {manifest.versions.rotationzoo}",
        "generation_id": generation,
        "artifact": artifact.identity,
        "model": model.id,
        "model_revision": model.revision,
        "config_sha256": model.config_sha256,
        "weights_fingerprint": model.weights_fingerprint,
        "recipe": recipe.name,
        "recipe_sha256": manifest.recipe_sha256,
        "key_statistic": recipe.key_statistic,
        "value_statistic": recipe.value_statistic,
        "composition": recipe.composition,
        "pooling": pooling,
        "tokens": tokens,
        "text_sha256": text_sha256,
        "post_rope": True,
        "accumulator_dtype": "float64",
    }
    return {name: value for name, value in entries.items() if value is not None} | served


def assemble_payload(artifact: Artifact, request: Settled) -> Payload:
    """An engine's payload. Raises `RotationZooError` for rotations that cannot be pooled."""
    recipe = artifact.recipe
    pools = request.pooled and artifact.rotations.per_head
    uncentered = reductions.dropped_means(artifact, request)
    rotations = reductions.reduced_rotations(artifact, pools, uncentered)
    objectives = {side: _objective(artifact, side, pools) for side in SIDES}
    key, value = (_side_matrices(rotations, *each) for each in objectives.items())
    served: Provenance = dict(zip(("sink", "recent"), request.windows, strict=True))
    served |= dict(zip(("key_clip", "value_clip"), request.clip, strict=True))
    if recipe.group_size is not None:
        served["group_size"] = recipe.group_size
    bits = {number: _most_bits(layer) for number, layer in artifact.rotations.items()}
    model = artifact.manifest.model  # only those from the hub have a revision
    return Payload(
        model=model.id if model.revision else str(find_model(artifact) or PLACEHOLDER),
        geometry=artifact.geometry,
        key=key,
        value=value,
        group_size=recipe.group_size,
        provenance=_provenance(artifact, pools, bool(uncentered), served),
        bits=bits,
    )


def _most_bits(layer: LayerRotations) -> float:
    """The mean bits per channel of the larger side; 2 without a budget."""
    widths = [layer[side].widths for side in SIDES]
    return max([its.double().mean().item() for its in widths if its is not None], default=2.0)


def _objective(artifact: Artifact, side: str, pools: bool) -> str:
    """The objective name, such as `qqt_r_h_pbr`. Imported files keep theirs unless pooled."""
    recipe, imported = artifact.recipe, artifact.manifest.imported
    if imported and not pools:
        pair = dict(zip(SIDES, rows_of(imported.objectives).pair, strict=True))
        return imported.objectives[pair[side]]
    if not recipe.has_eigenbasis:
        return recipe.composition
    statistic = recipe.key_statistic if side == "key" else recipe.value_statistic
    return f"{_WORDS[statistic]}_{recipe.composition}"


def _side_matrices(rotations: Rotations, side: str, objective: str) -> SideMatrices:
    """One side's matrices, without the head dimension if all layers share one among heads."""
    layers = {layer: sides[side] for layer, sides in rotations.items()}
    per_head = any(rotation.per_head for rotation in layers.values())
    heads = slice(None) if per_head else 0
    matrices, eigenvalues, means = {}, {}, {}
    for layer, rotation in layers.items():
        matrices[layer] = rotation.matrix[heads]
        if rotation.eigenvalues is not None:
            eigenvalues[layer] = rotation.eigenvalues[heads]
        if rotation.mean is not None:
            means[layer] = rotation.mean
    return SideMatrices(matrices, objective, eigenvalues, means)
