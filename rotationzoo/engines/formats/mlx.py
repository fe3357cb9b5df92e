"""The MLX engine (mlx-lm pull request 1789), which reads two safetensors files and their metadata.

MLX computes `x @ M^T`, so the files hold M = R^T.
"""

import json
from pathlib import Path

from safetensors.torch import save_file

from rotationzoo.engines.base import Launch, Options, Payload, check_limits

SCHEMA = "mlx-lm-oscar-rotations-v1"
FILES = {"key": "k_rotation.safetensors", "value": "v_rotation.safetensors"}
METADATA = "metadata.json"


def write_files(work: Path, final: Path, payload: Payload, options: Options) -> Launch:
    """Write both sides and their metadata to `work`.

    The command is Python code that names `final`. Raises `RotationZooError` for what MLX cannot
    run.
    """
    check_limits("MLX", payload, powers=True, groups=True)
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
    key_clip, value_clip = map(_clip_or_none, payload.clip)
    command = [
        "from pathlib import Path",
        "from mlx_lm.models.oscar import OscarConfig",
        "",
        "config = OscarConfig(",
        f"    group_size={payload.largest_group}, sink_tokens={payload.sink}, "
        f"recent_tokens={payload.recent}, k_clip_ratio={key_clip}, v_clip_ratio={value_clip}, "
        f"rotation_dir=Path({json.dumps(str(final))})",
        ")",
    ]
    return Launch(command, {}, notes)


def _clip_or_none(ratio: float) -> float | None:
    """The clip ratio as MLX wants it, which is None for no clipping."""
    return None if ratio == 1 else ratio
