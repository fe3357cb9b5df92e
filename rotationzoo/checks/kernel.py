"""Validation of the CUDA reference kernel against the codec's definition.

Every layer and head of an artifact is compared bit by bit, and the kernel's throughput is measured.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rotationzoo.artifact.layout import side_name
from rotationzoo.artifact.store import Artifact
from rotationzoo.checks.comparison import KernelComparison, draw_rows
from rotationzoo.codec import cuda, throughput
from rotationzoo.errors import RotationZooError
from rotationzoo.model import loading
from rotationzoo.model.geometry import cached_layers
from rotationzoo.progress import Progress, silent
from rotationzoo.writer import add_files

VALIDATION, SOURCE, FEEDBACK_SOURCE = "validation.json", "int2.cu", "feedback.cu"
_SUMMARIZED = ("on_gpu", "device", "rows", "codes_equal", "dequantized_equal")


@dataclass(frozen=True)
class Validation:
    """How a kernel is validated."""

    rows: int = 1024
    """How many rows are drawn per layer, KV head and side."""
    device: str = "auto"
    speed: bool = True
    """Whether to measure throughput too."""


def validate_kernel(
    artifact: Artifact, settings: Validation = Validation(), progress: Progress = silent
) -> dict[str, Any]:
    """Compare the kernel with the codec's definition on every layer, KV head and side.

    Where rows have a factor of error feedback, both encoders are compared. Adds `validation.json`
    and the sources that ran to the artifact and returns the report. Raises `RotationZooError` at
    the first difference, naming its layer, head, row and both values.
    Without a GPU only the definition is checked: the report says so, and the artifact is not
    changed.
    """
    on_gpu = loading.torch_device(settings.device) == "cuda"
    # Fail now if the result could not be saved, not after it was computed.
    if on_gpu:
        artifact.check_writable()
    comparison = _compare_layers(artifact, settings, on_gpu, progress)
    report = comparison.report()
    report["identity"] = artifact.identity
    if not on_gpu:
        return report
    if settings.speed:
        progress("measuring", 0, 0)
        dim = cached_layers(artifact.geometry)[0].key_dim
        clip = artifact.clip_ratios["key"]
        report |= throughput.measure(dim, artifact.recipe.group_size, clip)
        if report["feedback_rows"]:
            report |= throughput.measure_feedback(dim, artifact.recipe.group_size)
    content = json.dumps(report, indent=2) + "\n"
    files = {VALIDATION: content.encode(), SOURCE: cuda.SOURCE.read_bytes()}
    if report["feedback_rows"]:
        files[FEEDBACK_SOURCE] = cuda.FEEDBACK_SOURCE.read_bytes()
    summary = {key: report[key] for key in _SUMMARIZED}
    add_files(artifact, files, {"validation": summary})
    return report


def check_device(folder: Path, device: str) -> None:
    """Raise `RotationZooError` if there is no GPU, unless the user asked for the CPU.

    A CPU checks less, so it is never chosen silently.
    """
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
    """Compare on drawn rows, after subtracting the artifact's mean."""
    comparison = KernelComparison(artifact.recipe.group_size, on_gpu)
    rotations, statistics = artifact.rotations, artifact.statistics
    layers = cached_layers(artifact.geometry)
    done, total = 0, 2 * len(layers)
    progress("validating", done, total)
    for layer in layers:
        for side, dim in (("key", layer.key_dim), ("value", layer.value_dim)):
            rotation = rotations[layer.index][side]
            moments = None if statistics is None else statistics[layer.index][side]
            # `done` differs for each side of each layer and is the same in every run.
            rows = draw_rows(moments, layer.kv_heads, settings.rows, dim, seed=done)
            if rotation.mean is not None:
                rows = rows - rotation.mean[:, None]
            matrices = rotation.matrix.expand(layer.kv_heads, -1, -1)
            name = side_name(layer.index, side)
            comparison.compare(name, rows, matrices, rotation.clip, rotation.feedback)
            progress("validating", done := done + 1, total)
    return comparison
