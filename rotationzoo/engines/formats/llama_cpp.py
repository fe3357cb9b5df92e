"""llama.cpp with a 2-bit cache: OSCAR's fork, and one that grew from it. Rotations are tensors of
the model's own GGUF file.

The graph computes `ggml_mul_mat(rot, K)`, which is `K @ R` for a tensor that holds R transposed.
"""

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rotationzoo.engines.base import (
    MOST_LAYERS,
    OTHERS,
    SIDES,
    Capabilities,
    Launch,
    Options,
    Payload,
    RotationFile,
    Side,
    check_regular,
    named,
    number,
    one_dim,
    primitives,
)
from rotationzoo.engines.formats.gguf_base import check_layers, compare
from rotationzoo.engines.formats.gguf_header import check_header
from rotationzoo.errors import RotationZooError, first_sentence
from rotationzoo.linalg.compositions import block_hadamard
from rotationzoo.model.geometry import Geometry, cached_layers

NAME = "llama.cpp"
CAPABILITIES = Capabilities(heads=False, mean=False, clip="one", windows=True)
_TENSOR = {"key": "blk.{}.attn_k_rot.weight", "value": "blk.{}.attn_v_rot.weight"}
_PATTERN = re.compile(r"blk\.(\d{1,9})\.attn_([kv])_rot\.weight")
_NOTE = "rotationzoo."
# Cache type by architecture. `oscar2` is of the other fork, which neither clips nor keeps tokens
# exact.
_CACHE_TYPE = {"qwen3": "q2_0", "qwen3moe": "oscar2", "qwen35": "oscar2", "gemma4": "oscar2"}
_BLOCK = 32  # channels in a block of either type


def check(geometry: Geometry, serving: Payload) -> None:
    """Raise `RotationZooError` for what neither fork can run."""
    one_dim("llama.cpp", geometry)
    _package()
    for layer in cached_layers(geometry):
        if layer.key_dim % _BLOCK:
            raise RotationZooError(
                f"llama.cpp cannot run head dimension {layer.key_dim}: its blocks have {_BLOCK} channels",
                hint=OTHERS,
            )


def write(work: Path, final: Path, serving: Payload, options: Options) -> Launch:
    """Write a copy of the base model with rotations to `work`. Raises `RotationZooError` for a base
    that does not fit."""
    if options.base is None:
        raise RotationZooError(
            "llama.cpp reads rotations from the model's own file", hint="name it: --base MODEL.gguf"
        )
    reader = _read(options.base)
    architecture = named(_field(reader, "general.architecture"))
    _check_base(reader, architecture, options.base, serving)
    compared = compare(options, reader, _package(), serving)
    name = f"{options.base.stem}-rot-kv.gguf"
    tensors = {
        _TENSOR[kind].format(layer): np.ascontiguousarray(
            _followed(kind, matrix, options.engine_hadamard).mT.numpy()
        )
        for kind, side in (("key", serving.key), ("value", serving.value))
        if side is not None
        for layer, matrix in side.rotation.items()
    }
    notes = {
        **serving.provenance,
        "key_objective": serving.key.objective,
        "engine_hadamard": options.engine_hadamard,
    }
    notes["value_objective"] = (
        "in the weights" if serving.value is None else serving.value.objective
    )
    _copy(reader, architecture, work / name, tensors, notes)

    clip, _ = serving.clip
    kind = _CACHE_TYPE[architecture]
    said = [
        "needs OSCAR's fork of llama.cpp (branch zhongzhu/llamacpp)"
        if kind == "q2_0"
        else "needs llama-cpp-turboquant"
    ]
    environment: dict[str, str] = {}
    if options.engine_hadamard:
        said.append(
            "these rotations need llama.cpp's own attention rotation (its pull request 21038): see that it is on"
        )
        environment["LLAMA_KV_NO_HADAMARD"] = "1"
    else:
        environment |= {"LLAMA_KV_NO_HADAMARD": "1", "LLAMA_ATTN_ROT_DISABLE": "1"}
        said.append(
            "without these variables llama.cpp applies a Hadamard transform of its own, which cancels the calibrated one; "
            "--engine-hadamard writes rotations that count on it"
        )
    if kind == "q2_0":
        environment["LLAMA_KV_CLIP_RATIO"] = number(clip, off=1)
        environment |= {
            "LLAMA_KV_HP_SINK": str(serving.sink),
            "LLAMA_KV_HP_RECENT": str(serving.recent),
        }
        said.append(
            "its q2_0 rounds to a codebook of its own, on blocks of 128 channels: not the codec of `evaluate`; as it ships, "
            "with outer levels a third too small, rotations can serve worse than none (docs/engines.md has figures), and "
            "without exact windows it is of no use"
        )
    if architecture == "gemma4" and serving.value is not None:
        environment["LLAMA_KV_V_ROT"] = "1"
    said.append(compared)
    said.append(
        "keep the base: llama.cpp itself refuses the copy, whose rotations it does not know (wrong number of tensors)"
    )
    if serving.value is None:
        said.append(
            "no value rotation is written: the base must be converted from weights that carry it"
        )
    command = f"llama-server -m {shlex.quote(str(final / name))} --cache-type-k {kind} --cache-type-v {kind} -fa on"
    return Launch([command], environment, said)


def read(path: Path) -> list[RotationFile]:
    """The rotations in a model file, keys and values. Raises `RotationZooError` where there are
    none."""
    reader = _read(path)
    matrices: dict[str, dict[int, torch.Tensor]] = {"key": {}, "value": {}}
    for tensor in reader.tensors:
        if match := _PATTERN.fullmatch(tensor.name):
            if int(match[1]) >= MOST_LAYERS:
                raise RotationZooError(
                    f"{path.name} has a layer {match[1]}, and no model has", hint="do not use it"
                )
            matrices["key" if match[2] == "k" else "value"][int(match[1])] = _matrix(path, tensor)
    if not matrices["key"]:
        raise RotationZooError(
            f"{path.name} holds no key rotations", hint="give a file that has been baked with some"
        )
    notes = primitives(
        {k.removeprefix(_NOTE): _field(reader, k) for k in reader.fields if k.startswith(_NOTE)}
    )
    if not matrices["value"]:
        raise RotationZooError(
            f"{path.name} has key rotations and no value rotations",
            hint="its weights may carry them, from which they cannot be read",
        )
    said: tuple[str, ...] = ()
    if notes.get("engine_hadamard"):
        for kind, side in matrices.items():
            for layer, matrix in side.items():
                side[layer] = (matrix.double() @ _engine_transform(kind, matrix.shape[-1])).float()
        said = ("written for an engine that adds a Hadamard transform; it has been added here",)
    sides = {
        side: Side(dict(sorted(matrices[side].items())), named(notes.get(f"{side}_objective")))
        for side in SIDES
    }
    return [RotationFile(path, "GGUF", side, sides[side], notes, said) for side in SIDES]


def _matrix(path: Path, tensor: Any) -> torch.Tensor:
    """R, `[D, D]` float32, of a tensor that holds it transposed, in whatever type."""
    try:
        stored = torch.from_numpy(
            _package().quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        )
    except Exception as error:  # types that the package cannot read
        raise RotationZooError(
            f"{tensor.name} of {path.name} cannot be read: {first_sentence(error)}"
        ) from error
    if stored.ndim != 2 or stored.shape[0] != stored.shape[1] or not stored.numel():
        raise RotationZooError(
            f"{tensor.name} of {path.name} is no square matrix, but {list(stored.shape)}"
        )
    return stored.mT.contiguous()


def _engine_transform(kind: str, dim: int) -> torch.Tensor:
    """The Hadamard transform `[D, D]` that llama.cpp's attention rotation applies: blocks of 64
    channels for values, for keys the largest power of two that divides the head
    (`llama_kv_cache::build_input_k_rot` and `build_input_v_rot`)."""
    block = 64
    while kind == "key" and dim % (2 * block) == 0:
        block *= 2
    if dim % block:
        raise RotationZooError(
            f"llama.cpp rotates no heads of dimension {dim} itself",
            hint="leave --engine-hadamard out",
        )
    return block_hadamard(dim, block)


def _followed(kind: str, matrix: torch.Tensor, engine_hadamard: bool) -> torch.Tensor:
    """What the graph must multiply by, `[D, D]`: R, or R H where the engine multiplies by H
    afterwards (H H = I)."""
    return (
        (matrix.double() @ _engine_transform(kind, len(matrix))).float()
        if engine_hadamard
        else matrix
    )


def _check_base(reader: Any, architecture: str, base: Path, serving: Payload) -> None:
    if architecture not in _CACHE_TYPE:
        raise RotationZooError(
            f"{base.name} is of architecture {architecture}; rotations are loaded for {', '.join(_CACHE_TYPE)} alone",
            hint=OTHERS,
        )
    dims = {layer.key_dim for layer in cached_layers(serving.geometry)}
    if len(dims) > 1 and architecture != "gemma4":
        raise RotationZooError(
            f"llama.cpp loads one head dimension for {architecture}, and this artifact has {sorted(dims)}"
        )
    if _CACHE_TYPE[architecture] == "oscar2" and (
        serving.clip != (1, 1) or serving.sink or serving.recent
    ):
        raise RotationZooError(
            f"the llama.cpp that runs {architecture} neither clips nor keeps tokens exact",
            hint="accept that with: --clip 1 --windows 0/0",
        )
    parts = _field(reader, "split.count")
    if isinstance(parts, int) and parts > 1:
        raise RotationZooError(
            f"{base.name} is one part of several",
            hint="join them first with: llama-gguf-split --merge",
        )
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    shared = any(layer.owner != layer.index for layer in serving.geometry)
    blocks = {
        int(found[1])
        for name in tensors
        if (found := re.fullmatch(r"blk\.(\d+)\.attn_k\.weight", name))
    }
    if not shared and (
        more := sorted(blocks - {layer.index for layer in cached_layers(serving.geometry)})
    ):
        raise RotationZooError(
            f"{base.name} is no model of this artifact: layer {more[0]} caches keys there, and has no rotation here",
            hint="give the base that was converted from the model of the artifact",
        )
    if rotated := next((name for name in tensors if _PATTERN.fullmatch(name)), None):
        raise RotationZooError(
            f"{base.name} has rotations already ({rotated})",
            hint="start from the file without them",
        )
    check_layers(base.name, tensors, serving)


def _copy(
    reader: Any,
    architecture: str,
    path: Path,
    tensors: dict[str, np.ndarray],
    notes: dict[str, Any],
) -> None:
    """The base with tensors and notes more; everything else as it was."""
    writer = _package().GGUFWriter(path, architecture, endianess=reader.endianess)
    try:
        _copy_fields(reader, writer)
        _write(reader, writer, tensors, notes)
    except (
        ValueError,
        TypeError,
        IndexError,
    ) as error:  # an empty list, or text that is none, which the package cannot write
        raise RotationZooError(
            f"the base model's metadata cannot be copied: {first_sentence(error)}"
        ) from error
    finally:
        writer.close()


def _copy_fields(reader: Any, writer: Any) -> None:
    package = _package()
    writer.data_alignment = reader.alignment
    for field in reader.fields.values():
        if field.name == "general.architecture" or field.name.startswith(("GGUF.", _NOTE)):
            continue  # the writer's own, and those of an earlier artifact
        kind = field.types[0]
        inner = field.types[-1] if kind == package.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)


def _write(reader: Any, writer: Any, tensors: dict[str, np.ndarray], notes: dict[str, Any]) -> None:
    for name, note in notes.items():
        add = writer.add_bool if isinstance(note, bool) else writer.add_string
        add(f"{_NOTE}{name}", note if isinstance(note, bool) else str(note))
    for tensor in reader.tensors:
        writer.add_tensor_info(
            tensor.name,
            tensor.data.shape,
            tensor.data.dtype,
            tensor.data.nbytes,
            tensor.tensor_type,
        )
    for name, matrix in tensors.items():
        writer.add_tensor_info(name, matrix.shape, matrix.dtype, matrix.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in reader.tensors:
        writer.write_tensor_data(tensor.data, tensor_endianess=reader.endianess)
    for matrix in tensors.values():
        writer.write_tensor_data(matrix)


def _read(path: Path) -> Any:
    package = _package()
    check_regular(path)
    check_header(path, {kind.value: sizes for kind, sizes in package.GGML_QUANT_SIZES.items()})
    try:
        return package.GGUFReader(path)
    except OSError as error:
        raise RotationZooError(
            f"{path} cannot be read: {error.strerror}", hint="check the path"
        ) from error
    except Exception as error:  # whatever a file that is none makes of the parser
        raise RotationZooError(
            f"{path} is no GGUF file: {error}", hint="give a file that llama.cpp loads"
        ) from error


def _field(reader: Any, name: str) -> Any:
    """What a file says; None where it does not, or says it in no way that can be read."""
    field = reader.get_field(name)
    try:
        return None if field is None else field.contents()
    except (ValueError, IndexError):
        return None


def _package() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise RotationZooError(
            "gguf is not installed",
            hint="run: pip install 'rotationzoo[engines]', or pip install gguf",
        ) from error
    return gguf
