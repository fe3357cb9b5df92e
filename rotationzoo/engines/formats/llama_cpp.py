"""The llama.cpp engine, which reads rotations from tensors in a copy of the model's GGUF file.

Two forks have a 2-bit cache: OSCAR's, and one that grew from it. The copied file, the base, must
have the shapes of the artifact's model, or it would fail to load or rotate the wrong layers.
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rotationzoo.artifact.reductions import Settled
from rotationzoo.codec.engine_needs import ENGINES
from rotationzoo.engines.base import PAGE, Launch, Payload, check_equal_dims, objective_name
from rotationzoo.errors import RotationZooError, first_sentence
from rotationzoo.geometry import cached_layers
from rotationzoo.rotations import SIDES
from rotationzoo.storage.gguf_reader import Reader, gguf, open_gguf

# Architecture -> cache type: `q2_0` of OSCAR's fork, or `oscar2`, which has no clip or windows.
_CACHE_TYPE = dict.fromkeys(ENGINES["llama.cpp"].gguf, "oscar2") | {"qwen3": "q2_0"}
_BLOCK = 32  # channels per block of either cache type
_OF_THE_MODEL = "give the base that was converted from the model of the artifact"
_KEYS = re.compile(r"blk\.(\d{1,9})\.attn_k\.weight")
_ROTATION = re.compile(r"blk\.\d{1,9}\.attn_[kv]_rot\.weight")
_NOTE = "rotationzoo."  # the prefix of the metadata fields that an export adds


def write_files(work: Path, final: Path, payload: Payload, request: Settled) -> Launch:
    """Write a copy of the base model, with rotations added, to `work`. Raises `RotationZooError`
    for what neither fork can run, and for a base that does not fit."""
    check_equal_dims("llama.cpp", payload)
    for dim in sorted(payload.head_dims):
        if dim % _BLOCK:
            blocks = f"its blocks have {_BLOCK} channels"
            raise RotationZooError(f"llama.cpp cannot run head dimension {dim}: {blocks}", PAGE)
    base = request.base
    if base is None:
        hint = "name it: --base MODEL.gguf"
        raise RotationZooError("llama.cpp reads rotations from the model's own file", hint)
    reader = open_gguf(base)
    # `objective_name` reduces any untrusted field to short printable text.
    architecture = objective_name(reader.value("general.architecture"))
    for problem, remedy in _problems(reader, architecture, request, payload):
        raise RotationZooError(problem, remedy)
    name, notes = f"{base.stem}-rot-kv.gguf", dict(payload.provenance)
    notes["key_objective"] = payload.key.objective
    notes["value_objective"] = payload.value.objective
    _write_copy(reader, work / name, _rotation_tensors(payload), notes)
    return _launch(final / name, architecture, request)


def _problems(
    reader: Reader, architecture: str, request: Settled, payload: Payload
) -> Iterator[tuple[str, str | None]]:
    """The reasons why a base cannot carry the rotations, each with a remedy."""
    base, dims = reader.path.name, sorted(payload.head_dims)
    if architecture not in _CACHE_TYPE:
        alone = f"rotations are loaded for {', '.join(_CACHE_TYPE)} alone"
        yield f"{base} is of architecture {architecture}; {alone}", PAGE
    if len(dims) > 1 and architecture != "gemma4":
        yield f"llama.cpp loads one head dimension for {architecture}, not {dims}", None
    served = request.clip, request.windows
    if _CACHE_TYPE[architecture] == "oscar2" and served != ((1, 1), (0, 0)):
        lacks = f"the llama.cpp that runs {architecture} neither clips nor keeps tokens exact"
        yield lacks, "accept that with: --clip 1 --windows 0/0"
    shapes = {tensor.name: tensor.shape.tolist() for tensor in reader.tensors}
    for name in filter(_ROTATION.fullmatch, shapes):
        yield f"{base} has rotations already ({name})", "start from the file without them"
    for misfit in _misfits(shapes, payload):
        yield f"{base} is not the model of this artifact: {misfit}", _OF_THE_MODEL


def _misfits(shapes: dict[str, list[int]], payload: Payload) -> Iterator[str]:
    """The differences between the layers of a file and those of the artifact."""
    layers = {layer.index: layer for layer in cached_layers(payload.geometry)}
    blocks = {int(match[1]) for match in map(_KEYS.fullmatch, shapes) if match}
    for missing in sorted(layers.keys() - blocks):
        yield f"it has no keys in layer {missing}, which has rotations in the artifact"
    # Layers that read another layer's cache may have key projections that are unused.
    if len(layers) == len(payload.geometry):
        for other in sorted(blocks - layers.keys()):
            yield f"layer {other} caches keys, and has no rotation in the artifact"
    for index, layer in layers.items():
        for name in ("attn_k.weight", "attn_v.weight"):
            # Some layers of Gemma 4 use their keys as values. ggml lists input channels first.
            rows = shapes.get(f"blk.{index}.{name}", [layer.kv_heads * layer.key_dim])[-1]
            if rows != layer.kv_heads * layer.key_dim:
                heads = f"{layer.kv_heads} KV heads of {layer.key_dim}"
                yield f"layer {index} should have {heads}, and its {name} has {rows} rows"


def _launch(file: Path, architecture: str, request: Settled) -> Launch:
    kind = _CACHE_TYPE[architecture]
    types = f"--cache-type-k {kind} --cache-type-v {kind}"
    command = f"llama-server -m {shlex.quote(str(file))} {types} -fa on"
    # They turn off Hadamard transforms in the quantizer and in the graph.
    environment = {"LLAMA_KV_NO_HADAMARD": "1", "LLAMA_ATTN_ROT_DISABLE": "1"}
    needs, codec = ["needs llama-cpp-turboquant"], list[str]()
    if kind == "q2_0":
        environment["LLAMA_KV_CLIP_RATIO"] = f"{request.clip[0]:g}"
        environment["LLAMA_KV_HP_SINK"] = str(request.windows[0])
        environment["LLAMA_KV_HP_RECENT"] = str(request.windows[1])
        needs = ["needs OSCAR's fork of llama.cpp (branch zhongzhu/llamacpp)"]
        codec = [
            "its q2_0 rounds to a codebook of its own, on blocks of 128 channels: not the codec of "
            "`evaluate`; as it ships, with outer levels a third too small, rotations can serve "
            "worse than none (docs/engines.md has figures), and without exact windows it is of no "
            "use"
        ]
    if architecture == "gemma4":
        environment["LLAMA_KV_V_ROT"] = "1"
    notes = [
        *needs,
        "without these variables llama.cpp applies a Hadamard transform of its own, which cancels "
        "the calibrated one",
        *codec,
        "the base was compared by its shapes alone: it must be of this artifact's model",
        "keep the base: llama.cpp itself refuses the copy, whose rotations it does not know (wrong "
        "number of tensors)",
    ]
    return Launch([command], environment, notes)


# ---- GGUF files


def _write_copy(
    reader: Reader, path: Path, tensors: Mapping[str, np.ndarray], notes: Mapping[str, Any]
) -> None:
    """Copy the open file to `path`, with tensors and notes added and all else unchanged. Raises
    `RotationZooError` for metadata that cannot be copied."""
    own = "general.architecture"
    writer = gguf.GGUFWriter(path, reader.value(own))
    writer.data_alignment = reader.alignment
    try:
        for field in reader.fields.values():
            # The writer adds its own, and an earlier export's notes are dropped.
            if field.name != own and not field.name.startswith(("GGUF.", _NOTE)):
                kind, inner = field.types[0], field.types[-1]
                writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)
        for name, note in notes.items():
            if isinstance(note, bool):
                writer.add_bool(f"{_NOTE}{name}", note)
            else:
                writer.add_string(f"{_NOTE}{name}", str(note))
        for tensor in reader.tensors:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        for name, matrix in tensors.items():
            writer.add_tensor(name, matrix)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    except (ValueError, TypeError) as error:
        # The package can read empty lists and invalid text, but it cannot write them.
        problem = f"the base model's metadata cannot be copied: {first_sentence(error)}"
        raise RotationZooError(problem) from error
    finally:
        writer.close()


def _rotation_tensors(payload: Payload) -> dict[str, np.ndarray]:
    """Tensor name -> the matrix `[D, D]` in the file, keys before values."""
    tensors = {}
    for side, matrices in zip(SIDES, (payload.key, payload.value), strict=True):
        for layer, matrix in matrices.rotation.items():
            name = f"blk.{layer}.attn_{side[0]}_rot.weight"
            tensors[name] = np.ascontiguousarray(matrix.mT.numpy())
    return tensors
