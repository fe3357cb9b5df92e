"""MLX with pull request 1789 of mlx-lm: two safetensors files and their metadata. It computes `x @
M^T`: M is R transposed."""

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from rotationzoo.engines.base import (
    MOST_LAYERS,
    Capabilities,
    Launch,
    Options,
    Payload,
    RotationFile,
    Side,
    check_regular,
    check_tensor,
    identity_like,
    mapping,
    named,
    one_group,
    power_of_two,
    primitives,
)
from rotationzoo.errors import RotationZooError, first_sentence
from rotationzoo.model.geometry import Geometry

NAME = "mlx"
CAPABILITIES = Capabilities(heads=True, mean=False, clip="side", windows=True)
SCHEMA = "mlx-lm-oscar-rotations-v1"
FILES = {"key": "k_rotation.safetensors", "value": "v_rotation.safetensors"}
METADATA = "metadata.json"


def check(geometry: Geometry, serving: Payload) -> None:
    """Raise `RotationZooError` for what it cannot run."""
    power_of_two("MLX", geometry)
    one_group("MLX", geometry, serving)


def write(work: Path, final: Path, serving: Payload, options: Options) -> Launch:
    """Write both sides and their metadata to `work`; the lines name `final`."""
    value = serving.value or identity_like(serving.key, serving.geometry)
    for name, side in ((FILES["key"], serving.key), (FILES["value"], value)):
        tensors = {
            f"layer_{layer}": matrix.mT.contiguous() for layer, matrix in side.rotation.items()
        }
        save_file(tensors, work / name)
    metadata = {
        "schema": SCHEMA, "algorithm": "FutureMLS-Lab OSCAR", "paper": "arXiv:2605.17757",
        "layer_indices": sorted(serving.key.rotation),
        "objectives": {"key": serving.key.objective, "value": value.objective}, "provenance": dict(serving.provenance),
    }  # fmt: skip
    (work / METADATA).write_text(
        json.dumps(metadata, indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )
    key_clip, value_clip = (None if ratio == 1 else ratio for ratio in serving.clip)
    command = [
        "from pathlib import Path",
        "from mlx_lm.models.oscar import OscarConfig",
        "",
        "config = OscarConfig(",
        f"    group_size={serving.group}, sink_tokens={serving.sink}, recent_tokens={serving.recent}, "
        f"k_clip_ratio={key_clip}, v_clip_ratio={value_clip}, rotation_dir=Path({json.dumps(str(final))})",
        ")",
    ]
    notes = [
        "needs mlx-lm with pull request 1789, which was closed unmerged",
        "clips within each group, not within the row",
    ]
    return Launch(command, {}, notes)


def read(path: Path) -> RotationFile:
    """One side. Raises `RotationZooError` for what is no such file."""
    check_regular(path)
    try:
        tensors = load_file(path)
    except Exception as error:  # the library has errors of several kinds for what is no such file
        raise RotationZooError(
            f"{path} is no safetensors file: {first_sentence(error)}", hint="fetch it again"
        ) from error
    rotation: dict[int, torch.Tensor] = {}
    for name, tensor in tensors.items():
        number = re.fullmatch(r"layer_(0|[1-9]\d{0,8})", name)
        if number is None:
            shared = (
                "one matrix for all layers, which an artifact has not"
                if name == "rotation"
                else f"a tensor {name!r:.60}"
            )
            raise RotationZooError(f"{path.name} is no MLX rotation file: it holds {shared}")
        if int(number[1]) >= MOST_LAYERS:
            raise RotationZooError(
                f"{path.name} has a layer {number[1]}, and no model has", hint="do not use it"
            )
        check_tensor(path, name, tensor)
        if tensor.ndim < 2:
            raise RotationZooError(
                f"{name} of {path.name} is no square matrix, but {list(tensor.shape)}"
            )
        rotation[int(number[1])] = tensor.mT.contiguous()
    if not rotation:
        raise RotationZooError(f"{path.name} is no MLX rotation file: it holds no layers")
    metadata = path.with_name(METADATA)
    try:
        said = mapping(
            json.loads(metadata.read_text(encoding="utf-8")) if metadata.is_file() else {}
        )
    except (ValueError, OSError, RecursionError) as error:
        raise RotationZooError(f"{metadata} is damaged: it is no JSON") from error
    side = next((side for side, name in FILES.items() if path.name.startswith(name[:2])), None)
    content = Side(
        dict(sorted(rotation.items())), named(mapping(said.get("objectives")).get(side or ""))
    )
    return RotationFile(path, "MLX", side, content, primitives(said.get("provenance")))  # type: ignore[arg-type]
