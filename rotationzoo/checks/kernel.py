"""Validation of the CUDA reference kernel against the codec's definition.

Every layer and head of an artifact is compared bit by bit, and the kernel's throughput is measured
next to a device copy in the same run.
"""

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rotationzoo.artifact.layout import side_name
from rotationzoo.artifact.store import Artifact
from rotationzoo.checks.comparison import KernelComparison, draw_rows
from rotationzoo.codec import cuda, kernels
from rotationzoo.codec.cuda_encoder import clip_encoder
from rotationzoo.codec.cuda_rows import dequantize
from rotationzoo.errors import RotationZooError
from rotationzoo.geometry import cached_layers
from rotationzoo.model import loading
from rotationzoo.progress import Progress, silent
from rotationzoo.writer import add_files, check_writable

VALIDATION, SOURCE, FEEDBACK_SOURCE = "validation.json", "int2.cu", "feedback.cu"
_MEASURED_ROWS = 4 << 20
_REPEATS = 20
_WARM_UP = 3  # uncounted launches, which pay for compiling and allocating


def validate_kernel(
    artifact: Artifact, rows: int = 1024, device: str = "auto", progress: Progress = silent
) -> dict[str, Any]:
    """Compare the kernel with the codec's definition on `rows` rows of every layer, KV head and
    side, and return the report, which is added to the artifact with the sources that ran.

    Raises `RotationZooError` at the first difference. Without a GPU only the definition is checked:
    the report says so, and the artifact is not changed.
    """
    on_gpu = loading.torch_device(device) == "cuda"
    # Fail now if the result could not be saved, not after it was computed.
    if on_gpu:
        check_writable(artifact)
    comparison = _compare_layers(artifact, rows, on_gpu, progress)
    report = comparison.report() | {"identity": artifact.identity}
    if not on_gpu:
        return report
    progress("measuring", 0, 0)
    dim = cached_layers(artifact.geometry)[0].key_dim
    report |= _measure_rates(dim, artifact.recipe.group_size, artifact.recipe.key_clip)
    content = json.dumps(report, indent=2) + "\n"
    files = {VALIDATION: content.encode(), SOURCE: kernels.source_of(SOURCE).encode()}
    if report["feedback_rows"]:
        files[FEEDBACK_SOURCE] = kernels.source_of(FEEDBACK_SOURCE).encode()
    summary = {"device": report["device"], "rows": report["rows"]}
    add_files(artifact, files, {"validation": summary})
    return report


def check_device(folder: Path, device: str) -> None:
    """Raise `RotationZooError` if there is no GPU, unless the user asked for the CPU: it checks
    less, so it is never chosen silently."""
    if device == "auto" and loading.torch_device(device) != "cuda":
        raise RotationZooError(
            f"{folder} is not validated: the CUDA reference needs an NVIDIA GPU, and there is none "
            "here",
            hint="run the same command on a machine with one; "
            "--device cpu checks the codec's definition alone",
        )


def _compare_layers(
    artifact: Artifact, count: int, on_gpu: bool, progress: Progress
) -> KernelComparison:
    """Compare on `count` drawn rows of each KV head, after subtracting the artifact's mean."""
    comparison = KernelComparison(artifact.recipe.group_size, on_gpu)
    rotations, averages = artifact.rotations, artifact.statistics
    layers = cached_layers(artifact.geometry)
    done, total = 0, sum(len(layer.sides) for layer in layers)
    progress("validating", done, total)
    for layer in layers:
        for side in layer.sides:
            dim = layer.dims[side]
            rotation = rotations[layer.index][side]
            moments = None if averages is None else averages[layer.index][side]
            # `done` differs for each side of each layer and is the same in every run.
            rows = draw_rows(moments, layer.kv_heads, count, dim, seed=done)
            if rotation.mean is not None:
                rows = rows - rotation.mean[:, None]
            matrices = rotation.matrix.expand(layer.kv_heads, -1, -1)
            name = side_name(layer.index, side)
            comparison.compare(name, rows, matrices, rotation.clip, rotation.feedback)
            progress("validating", done := done + 1, total)
    return comparison


def _measure_rates(dim: int, group_size: int | None, clip: float) -> dict[str, float]:
    """Bytes that a copy and both kernels read and write per second on bfloat16 rows `[1, N, D]`:
    the rows, the packed codes and the metadata."""
    dtype = torch.bfloat16
    free, _ = torch.cuda.mem_get_info()
    # Rows, their copy and restored rows; one byte per channel allows for codes and metadata.
    count = min(_MEASURED_ROWS, int(free * 0.8) // (dim * (3 * dtype.itemsize + 1)))
    rows = torch.randn(1, count, dim, device="cuda", dtype=dtype)
    variant = cuda.Variant(dim, group_size or dim, dtype)
    encoder = clip_encoder(torch.tensor([clip]), variant, rows.device)
    packed, copied = encoder.store(rows), torch.empty_like(rows)
    moved = rows.nbytes + packed.codes.nbytes + packed.metadata.nbytes
    return {
        "quantize_bytes_per_second": moved / _seconds(lambda: encoder.store(rows)),
        "dequantize_bytes_per_second": moved / _seconds(lambda: dequantize(packed, dtype)),
        "copy_bytes_per_second": 2 * rows.nbytes / _seconds(lambda: copied.copy_(rows)),
    }


def _seconds(launch: Callable[[], object]) -> float:
    """Median GPU time of a launch, in seconds."""
    event: Any = torch.cuda.Event
    times: list[float] = []
    for number in range(_REPEATS + _WARM_UP):
        start, end = event(enable_timing=True), event(enable_timing=True)
        start.record()
        launch()
        end.record()
        end.synchronize()
        if number >= _WARM_UP:
            times.append(start.elapsed_time(end) / 1000)
    return statistics.median(times)
