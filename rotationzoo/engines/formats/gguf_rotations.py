"""Rotations as tensors of a GGUF file: names, orientation, writing and reading back.

llama.cpp's graph computes `ggml_mul_mat(rot, K)`. That is `K @ R` if the tensor `rot` holds R
transposed.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rotationzoo.engines.base import Payload, SideMatrices
from rotationzoo.engines.formats.gguf_file import NOTE, gguf_package, open_gguf, read_field
from rotationzoo.engines.formats.reading import check_layer, objective_name, primitives
from rotationzoo.engines.rotation_file import RotationFile
from rotationzoo.errors import RotationZooError, first_sentence
from rotationzoo.linalg.compositions import block_hadamard
from rotationzoo.rotations import SIDES

ROTATION_NAME = re.compile(r"blk\.(\d{1,9})\.attn_([kv])_rot\.weight")
_NAME = {"key": "blk.{}.attn_k_rot.weight", "value": "blk.{}.attn_v_rot.weight"}
_VALUE_BLOCK = 64  # channels per block of llama.cpp's own Hadamard transform of values


def rotation_tensors(payload: Payload, engine_hadamard: bool) -> dict[str, np.ndarray]:
    """Tensor name -> the matrix `[D, D]` that the file holds, keys before values.

    With `engine_hadamard`, it holds matrices that the engine's own Hadamard transform turns into R.
    """
    sides = {"key": payload.key}
    if payload.value is not None:
        sides["value"] = payload.value
    tensors = {}
    for side, matrices in sides.items():
        for layer, matrix in matrices.rotation.items():
            if engine_hadamard:
                matrix = _with_engine_hadamard(side, matrix)
            tensors[_NAME[side].format(layer)] = np.ascontiguousarray(matrix.mT.numpy())
    return tensors


def read_gguf(path: Path) -> list[RotationFile]:
    """The key and value rotations in a model file.

    Raises `RotationZooError` if either side is missing.
    """
    reader = open_gguf(path)
    matrices = _read_matrices(path, reader)
    if not matrices["key"]:
        raise RotationZooError(
            f"{path.name} holds no key rotations", hint="give a file that has been baked with some"
        )
    if not matrices["value"]:
        raise RotationZooError(
            f"{path.name} has key rotations and no value rotations",
            hint="its weights may carry them, from which they cannot be read",
        )
    notes = primitives(
        {
            name.removeprefix(NOTE): read_field(reader, name)
            for name in reader.fields
            if name.startswith(NOTE)
        }
    )
    remarks: tuple[str, ...] = ()
    if notes.get("engine_hadamard"):
        for side, by_layer in matrices.items():
            for layer, matrix in by_layer.items():
                by_layer[layer] = _with_engine_hadamard(side, matrix)
        remarks = ("written for an engine that adds a Hadamard transform; it has been added here",)
    files = []
    for side in SIDES:
        objective = objective_name(notes.get(f"{side}_objective"))
        content = SideMatrices(dict(sorted(matrices[side].items())), objective)
        files.append(RotationFile(path, "GGUF", side, content, notes, remarks))
    return files


def _read_matrices(path: Path, reader: Any) -> dict[str, dict[int, torch.Tensor]]:
    matrices: dict[str, dict[int, torch.Tensor]] = {"key": {}, "value": {}}
    for tensor in reader.tensors:
        if match := ROTATION_NAME.fullmatch(tensor.name):
            check_layer(path, match[1])
            side = "key" if match[2] == "k" else "value"
            matrices[side][int(match[1])] = _read_matrix(path, tensor)
    return matrices


def _read_matrix(path: Path, tensor: Any) -> torch.Tensor:
    """R, float32 `[D, D]`, from a tensor that holds it transposed, in any type."""
    try:
        numbers = gguf_package().quants.dequantize(tensor.data, tensor.tensor_type)
        stored = torch.from_numpy(numbers.astype(np.float32))
    except Exception as error:  # a type that the package cannot read
        raise RotationZooError(
            f"{tensor.name} of {path.name} cannot be read: {first_sentence(error)}"
        ) from error
    if stored.ndim != 2 or stored.shape[0] != stored.shape[1] or not stored.numel():
        raise RotationZooError(
            f"{tensor.name} of {path.name} is no square matrix, but {list(stored.shape)}"
        )
    return stored.mT.contiguous()


def _with_engine_hadamard(side: str, matrix: torch.Tensor) -> torch.Tensor:
    """R H, float32 `[D, D]`, which becomes R when the engine multiplies by H afterwards.

    The same product also converts back, because H H = I.
    """
    return (matrix.double() @ _engine_transform(side, matrix.shape[-1])).float()


def _engine_transform(side: str, dim: int) -> torch.Tensor:
    """The Hadamard transform `[D, D]` that llama.cpp's own attention rotation applies.

    Its blocks have 64 channels for values. For keys they have the largest power of two that divides
    the head dimension. See `llama_kv_cache::build_input_k_rot` and `build_input_v_rot`.
    """
    block = _VALUE_BLOCK
    while side == "key" and dim % (2 * block) == 0:
        block *= 2
    if dim % block:
        raise RotationZooError(
            f"llama.cpp rotates no heads of dimension {dim} itself",
            hint="leave --engine-hadamard out",
        )
    return block_hadamard(dim, block)
