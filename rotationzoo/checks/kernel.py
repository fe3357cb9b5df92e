"""Does the CUDA reference store what the codec defines? Every layer and head of an artifact, bit by
bit, and how fast."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rotationzoo.artifact.layout import side_name
from rotationzoo.artifact.store import Artifact
from rotationzoo.artifact.writer import add_files
from rotationzoo.checks.comparison import KernelComparison
from rotationzoo.checks.rows import capture_rows, draw_rows
from rotationzoo.codec import cuda, throughput
from rotationzoo.errors import RotationZooError
from rotationzoo.model import loading
from rotationzoo.model.geometry import cached_layers
from rotationzoo.model.source import find
from rotationzoo.progress import Progress, silent

VALIDATION, SOURCE = "validation.json", "int2.cu"
_SUMMARIZED = ("on_gpu", "device", "rows", "codes_equal", "dequantized_equal")


@dataclass(frozen=True)
class Validation:
    """What a kernel is validated on."""

    rows: int = 1024
    """Rows drawn for each layer, KV head and side."""
    model: str | None = None
    """The artifact's model, to validate also on as many rows captured from it."""
    revision: str | None = None
    device: str = "auto"
    speed: bool = True
    """Whether to measure throughput too."""


def validate_kernel(
    artifact: Artifact, settings: Validation = Validation(), progress: Progress = silent
) -> dict[str, Any]:
    """Compare the kernel with its definition on every layer, KV head and side; add
    `validation.json` and `int2.cu` to the artifact, and return the report.

    Raises `RotationZooError` with layer, head, row and both values where the two differ. Without a
    GPU the definition alone is checked, which the report says, and the artifact stays as it is.
    """
    on_gpu = loading.torch_device(settings.device) == "cuda"
    # Whether the result can be saved is known before it is computed.
    if on_gpu:
        artifact.check_writable()
    comparison = _compare_layers(artifact, settings, on_gpu, progress)
    report = comparison.report()
    report["identity"] = artifact.identity
    report["captured_from"] = None
    if settings.model:
        report["captured_from"] = find(settings.model, settings.revision).label
    if not on_gpu:
        return report
    if settings.speed:
        progress("measuring", 0, 0)
        dim = cached_layers(artifact.geometry)[0].key_dim
        clip = artifact.clip_ratios["key"]
        report |= throughput.measure(dim, artifact.recipe.group_size, clip)
    content = json.dumps(report, indent=2) + "\n"
    files = {VALIDATION: content.encode(), SOURCE: cuda.SOURCE.read_bytes()}
    summary = {key: report[key] for key in _SUMMARIZED}
    add_files(artifact, files, {"validation": summary})
    return report


def check_device(folder: Path, device: str) -> None:
    """Raise `RotationZooError` where there is no GPU and the user did not ask for a CPU, which
    checks less."""
    if device == "auto" and loading.torch_device(device) != "cuda":
        raise RotationZooError(
            f"{folder} is not validated: the CUDA reference needs an NVIDIA GPU, and there is none "
            "here",
            hint="run the same command on a machine with one; "
            "--device cpu checks the codec's definition alone",
        )


def _compare_layers(
    artifact: Artifact, settings: Validation, on_gpu: bool, progress: Progress
) -> KernelComparison:
    """Compare on drawn rows, and on captured ones behind them, each without the mean that the
    artifact subtracts."""
    captured: dict[tuple[int, str], torch.Tensor] = {}
    if settings.model:
        captured = capture_rows(
            artifact, settings.model, settings.revision, settings.rows, settings.device
        )
    comparison = KernelComparison(artifact.recipe.group_size, on_gpu)
    rotations, statistics = artifact.rotations, artifact.statistics
    layers = cached_layers(artifact.geometry)
    done, total = 0, 2 * len(layers)
    for layer in layers:
        for side, dim in (("key", layer.key_dim), ("value", layer.value_dim)):
            rotation = rotations[layer.index][side]
            moments = None if statistics is None else statistics[layer.index][side]
            # `done` is another number for each side of each layer, and the same in every run.
            rows = draw_rows(moments, layer.kv_heads, settings.rows, dim, seed=done)
            if (layer.index, side) in captured:
                rows = torch.cat([rows, captured[layer.index, side]], dim=1)
            if rotation.mean is not None:
                rows = rows - rotation.mean[:, None]
            matrices = rotation.matrix.expand(layer.kv_heads, -1, -1)
            comparison.compare(side_name(layer.index, side), rows, matrices, rotation.clip)
            progress("validating", done := done + 1, total)
    return comparison
