"""GGUF files: copied with rotations added, and the rotations in them read back.

llama.cpp's graph computes `ggml_mul_mat(rot, K)`. That is `K @ R` if the tensor `rot` holds R
transposed.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rotationzoo.engines import rotation_file
from rotationzoo.engines.base import Payload, SideMatrices
from rotationzoo.engines.rotation_file import RotationFile
from rotationzoo.errors import RotationZooError, as_refusal, first_sentence
from rotationzoo.rotations import SIDES
from rotationzoo.storage.gguf_reader import Reader, gguf, open_gguf

ROTATION_NAME = re.compile(r"blk\.(\d{1,9})\.attn_([kv])_rot\.weight")
NOTE = "rotationzoo."
"""The prefix of the metadata fields that an export adds."""


def write_copy(
    reader: Reader, path: Path, tensors: Mapping[str, np.ndarray], notes: Mapping[str, Any]
) -> None:
    """Write a copy of the opened file to `path`, with tensors and notes added.

    Everything else stays as it was. Raises `RotationZooError` for metadata that cannot be copied.
    """
    own = "general.architecture"
    writer = gguf.GGUFWriter(path, reader.value(own), endianess=reader.endianess)
    writer.data_alignment = reader.alignment
    order: dict[str, Any] = {}
    if reader.byte_order == "S":  # gguf 0.17 has no such argument
        order["tensor_endianess"] = reader.endianess
    try:
        for field in reader.fields.values():
            # The writer adds its own, and an earlier export's notes are dropped.
            if field.name != own and not field.name.startswith(("GGUF.", NOTE)):
                kind, inner = field.types[0], field.types[-1]
                writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)
        for name, note in notes.items():
            if isinstance(note, bool):
                writer.add_bool(f"{NOTE}{name}", note)
            else:
                writer.add_string(f"{NOTE}{name}", str(note))
        for tensor in reader.tensors:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type, **order)
        for name, matrix in tensors.items():
            writer.add_tensor(name, matrix)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    except (ValueError, TypeError) as error:
        # The package can read empty lists and invalid text, but it cannot write them.
        raise RotationZooError(
            f"the base model's metadata cannot be copied: {first_sentence(error)}"
        ) from error
    finally:
        writer.close()


def rotation_tensors(payload: Payload) -> dict[str, np.ndarray]:
    """Tensor name -> the matrix `[D, D]` that the file holds, keys before values."""
    tensors = {}
    for side, matrices in zip(SIDES, (payload.key, payload.value), strict=True):
        for layer, matrix in matrices.rotation.items():
            name = f"blk.{layer}.attn_{side[0]}_rot.weight"
            tensors[name] = np.ascontiguousarray(matrix.mT.numpy())
    return tensors


def read(path: Path) -> list[RotationFile]:
    """The key and value rotations in a model file.

    Raises `RotationZooError` if either side is missing.
    """
    reader = open_gguf(path)
    own = [name for name in reader.fields if name.startswith(NOTE)]
    notes = rotation_file.primitives({name.removeprefix(NOTE): reader.value(name) for name in own})
    matrices: dict[str, dict[int, torch.Tensor]] = {"k": {}, "v": {}}
    for tensor in reader.tensors:
        if match := ROTATION_NAME.fullmatch(tensor.name):
            layer, letter = rotation_file.check_layer(path, match[1]), match[2]
            matrices[letter][layer] = _read_matrix(path, tensor)
    files = []
    for side in SIDES:
        rotation = dict(sorted(matrices[side[0]].items()))
        if not rotation:
            raise RotationZooError(
                f"{path.name} holds no {side} rotations",
                hint="give a file that was baked with both; values may be rotated in its weights, "
                "from which they cannot be read",
            )
        objective = rotation_file.objective_name(notes.get(f"{side}_objective"))
        files.append(RotationFile(path, "GGUF", side, SideMatrices(rotation, objective), notes))
    return files


def _read_matrix(path: Path, tensor: gguf.ReaderTensor) -> torch.Tensor:
    """R, float32 `[D, D]`, from a tensor that holds it transposed, in any type."""
    with as_refusal(f"{tensor.name} of {path.name} cannot be read"):  # of another type
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    return torch.from_numpy(np.atleast_2d(numbers).astype(np.float32)).mT.contiguous()
