"""The MLX engine (mlx-lm pull request 1789), which reads two safetensors files and their metadata.

MLX computes `x @ M^T`, so the files hold M = R^T.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rotationzoo.engines.base import Launch, Options, Payload, SideMatrices
from rotationzoo.engines.formats.reading import (
    as_mapping,
    check_layer,
    check_limits,
    check_regular,
    check_tensor,
    objective_name,
    primitives,
)
from rotationzoo.engines.rotation_file import RotationFile
from rotationzoo.errors import RotationZooError, first_sentence

SCHEMA = "mlx-lm-oscar-rotations-v1"
FILES = {"key": "k_rotation.safetensors", "value": "v_rotation.safetensors"}
METADATA = "metadata.json"


def check_payload(payload: Payload) -> None:
    """Raise `RotationZooError` for what MLX cannot run."""
    check_limits("MLX", payload, powers=True, groups=True)


def write_files(work: Path, final: Path, payload: Payload, options: Options) -> Launch:
    """Write both sides and their metadata to `work`.

    The command is Python code that names `final`.
    """
    value = payload.value_or_identity
    for name, side in ((FILES["key"], payload.key), (FILES["value"], value)):
        matrices = side.rotation.items()
        transposed = {f"layer_{layer}": matrix.mT.contiguous() for layer, matrix in matrices}
        save_file(transposed, work / name)
    metadata = {
        "schema": SCHEMA,
        "algorithm": "FutureMLS-Lab OSCAR",
        "paper": "arXiv:2605.17757",
        "layer_indices": sorted(payload.key.rotation),
        "objectives": {"key": payload.key.objective, "value": value.objective},
        "provenance": dict(payload.provenance),
    }
    text = json.dumps(metadata, indent=2, sort_keys=True) + "\n"
    (work / METADATA).write_text(text, encoding="utf-8")
    notes = [
        "needs mlx-lm with pull request 1789, which was closed unmerged",
        "clips within each group, not within the row",
    ]
    return Launch(_command(final, payload), {}, notes)


def _clip_or_none(ratio: float) -> float | None:
    """The clip ratio as MLX wants it, which is None for no clipping."""
    return None if ratio == 1 else ratio


def _command(final: Path, payload: Payload) -> list[str]:
    key_clip, value_clip = map(_clip_or_none, payload.clip)
    return [
        "from pathlib import Path",
        "from mlx_lm.models.oscar import OscarConfig",
        "",
        "config = OscarConfig(",
        f"    group_size={payload.largest_group}, sink_tokens={payload.sink}, "
        f"recent_tokens={payload.recent}, k_clip_ratio={key_clip}, v_clip_ratio={value_clip}, "
        f"rotation_dir=Path({json.dumps(str(final))})",
        ")",
    ]


def read_safetensors(path: Path) -> RotationFile:
    """One side's file. Raises `RotationZooError` for anything but an MLX rotation file."""
    check_regular(path)
    try:
        tensors = load_file(path)
    except Exception as error:  # safetensors raises errors of several kinds
        raise RotationZooError(
            f"{path} is no safetensors file: {first_sentence(error)}", hint="fetch it again"
        ) from error
    rotation: dict[int, torch.Tensor] = {}
    for name, tensor in tensors.items():
        layer = _layer_number(path, name)
        check_tensor(path, name, tensor)
        if tensor.ndim < 2:
            shape = list(tensor.shape)
            raise RotationZooError(f"{name} of {path.name} is no square matrix, but {shape}")
        rotation[layer] = tensor.mT.contiguous()
    if not rotation:
        raise RotationZooError(f"{path.name} is no MLX rotation file: it holds no layers")
    metadata = _read_metadata(path.with_name(METADATA))
    # Files may have been renamed, so only the prefix `k_` or `v_` decides.
    side = next((side for side, name in FILES.items() if path.name.startswith(name[:2])), None)
    objective = objective_name(as_mapping(metadata.get("objectives")).get(side or ""))
    content = SideMatrices(dict(sorted(rotation.items())), objective)
    return RotationFile(path, "MLX", side, content, primitives(metadata.get("provenance")))


def _layer_number(path: Path, name: str) -> int:
    number = re.fullmatch(r"layer_(0|[1-9]\d{0,8})", name)
    if number is not None:
        return check_layer(path, number[1])
    content = f"a tensor {name!r:.60}"
    if name == "rotation":
        content = "one matrix for all layers, which an artifact has not"
    hint = "such a file holds layer_0, layer_1 and so on; an artifact needs no import"
    raise RotationZooError(f"{path.name} is no MLX rotation file: it holds {content}", hint=hint)


def _read_metadata(path: Path) -> Any:
    if not path.is_file():
        return {}
    try:
        return as_mapping(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, OSError, RecursionError) as error:
        raise RotationZooError(f"{path} is damaged: it is no JSON") from error
