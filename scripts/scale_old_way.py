"""Calibration as OSCAR's published recipe does it, beside ours: all post-RoPE queries, keys and
values are written to disk, read back, and summed in float64 on the CPU.

The recipe is the published one (`compute_kv_rotation.py --method qqt_sst`, here `oscar-v1`). Files
`layer_<i>/{q,k,v}/<request>.pt` hold `[tokens, heads, D]`, as its server wrote them. One layer
after the other is read, cast to float64 and summed.
"""

import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from scale_models import Peak, measure_peak, seconds_of
from scale_statistics import Bench

from rotationzoo.calibration.fit import fit
from rotationzoo.linalg import compositions
from rotationzoo.model.capture import capture, decoder
from rotationzoo.recipe import PRESETS

_PUBLISHED = PRESETS["oscar-v1"]
_KINDS = "q", "k", "v"


@dataclass
class Seconds:
    """Where the time of one layer goes, in seconds for a layer."""

    write: float = 0.0
    read: float = 0.0
    moments: float = 0.0
    rotations: float = 0.0

    @property
    def total(self) -> float:
        return self.write + self.read + self.moments + self.rotations


@dataclass
class Dumped:
    """What came of the old way for some of the layers."""

    layers: list[int]
    seconds: Seconds = field(default_factory=Seconds)
    bytes: int = 0
    eigenvalues: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    """Layer -> side -> eigenvalues `[D]`, ascending."""
    peak: Peak = field(default_factory=Peak)


def measure_old_way(bench: Bench, layers: int, folder: Path | None, repeats: int) -> dict[str, Any]:
    """Times of both ways, from the loaded model to rotations of all layers.

    The old way is measured for `layers` of them, spread over the model, and its time for all of
    them is that of the forward passes and of as many layers as the model has.
    """
    count = min(layers, bench.shape.layers)
    chosen = [number * bench.shape.layers // count for number in range(count)]
    ours = {name: _measure_ours(bench, name, repeats) for name in ("oscar", "oscar-v1")}
    forward = statistics.median(seconds_of(bench.forward) for _ in range(repeats))
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="dump-", dir=folder) as directory:
        _check_space(bench, chosen, Path(directory))
        with measure_peak() as peak:
            dumped = _dump_and_fit(bench, chosen, Path(directory), forward)
    dumped.peak = peak
    part = dumped.seconds
    scale = bench.shape.layers / count
    total = forward + bench.shape.layers * part.total
    return {
        **bench.describe(),
        "measured_layers": chosen,
        "old": {
            "seconds": total,
            "forward_seconds": forward,
            "seconds_per_layer": vars(part),
            "bytes_written": round(dumped.bytes * scale),
            "host_peak_bytes": peak.host,
            "host_bytes_before": peak.host_before,
        },
        "ours": ours,
        "ratio": {name: total / way["seconds"] for name, way in ours.items()},
        "eigenvalue_difference": _difference(bench, dumped),
    }


def _measure_ours(bench: Bench, name: str, repeats: int) -> dict[str, Any]:
    """The time and the memory of one recipe."""
    recipe = PRESETS[name]

    def calibrate() -> None:
        fit(bench.collect(recipe), recipe, bench.geometry)

    calibrate()  # pays for what is set up once
    with measure_peak() as peak:
        times = [seconds_of(calibrate) for _ in range(repeats)]
    return {
        "seconds": statistics.median(times),
        "bytes_written": 0,
        "host_peak_bytes": peak.host,
        "host_bytes_before": peak.host_before,
    }


def _check_space(bench: Bench, layers: list[int], folder: Path) -> None:
    text, shape = bench.text, bench.shape
    needed = shape.activation_bytes(text.rows, text.length) * len(layers) // shape.layers
    free = shutil.disk_usage(folder).free
    if free < 1.1 * needed:
        sys.exit(
            f"{folder.parent} has {free / 1e9:.1f} GB free, and {needed / 1e9:.1f} GB would be "
            "written: give a larger --folder, or fewer --old-layers"
        )


@torch.no_grad()
def _dump_and_fit(bench: Bench, layers: list[int], folder: Path, forward: float) -> Dumped:
    """Write the activations of these layers in one pass over the text, then fit each of them.

    `forward` is the time of that pass alone.
    """
    dumped, seconds = Dumped(layers), Seconds()
    for layer in layers:
        for kind in _KINDS:
            (folder / f"layer_{layer}" / kind).mkdir(parents=True)
    row = 0

    def write(
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        if layer not in layers:
            return
        for kind, tensor in zip(_KINDS, (query, key, value), strict=True):
            for number, request in enumerate(tensor):
                path = folder / f"layer_{layer}" / kind / f"{row + number}.pt"
                tokens_first = request.transpose(0, 1).contiguous()
                torch.save(tokens_first.to("cpu", copy=True), path)

    def run() -> None:
        nonlocal row
        for ids in bench.text.batches(bench.shape):
            with capture(bench.model, write):
                decoder(bench.model)(input_ids=ids, use_cache=False)
            row += len(ids)

    seconds.write = (seconds_of(run) - forward) / len(layers)
    dumped.bytes = sum(path.stat().st_size for path in folder.rglob("*.pt"))
    for layer in layers:
        dumped.eigenvalues[layer] = _fit_layer(bench, folder / f"layer_{layer}", seconds)
    for name in ("read", "moments", "rotations"):
        setattr(seconds, name, getattr(seconds, name) / len(layers))
    dumped.seconds = seconds
    return dumped


def _fit_layer(bench: Bench, folder: Path, seconds: Seconds) -> dict[str, torch.Tensor]:
    """Eigenvalues of both sides of one layer; adds to `seconds` what it took."""
    start = time.perf_counter()
    query, key, value = (_read(folder / kind) for kind in _KINDS)
    read = time.perf_counter()
    heads = bench.shape.kv_heads
    query_rows = _by_head(query, heads)
    key_rows, value_rows = _by_head(key, heads), _by_head(value, heads)
    query_moment = query_rows.mT @ query_rows / query_rows.shape[1]
    energy = ((key_rows @ query_moment) * key_rows).sum(-1, keepdim=True)
    value_moment = (value_rows * energy).mT @ value_rows / energy.sum(1, keepdim=True)
    summed = time.perf_counter()
    eigenvalues = {}
    for side, moment in (("key", query_moment), ("value", value_moment)):
        eigenvalues[side], basis = compositions.eigenbasis(moment.mean(0))
        compositions.compose(basis, _PUBLISHED.composition, bench.shape.dim)
    seconds.read += read - start
    seconds.moments += summed - read
    seconds.rotations += time.perf_counter() - summed
    return eigenvalues


def _read(folder: Path) -> torch.Tensor:
    """The tokens of all requests `[N, H, D]`."""
    paths = sorted(folder.iterdir())
    return torch.cat([torch.load(path, weights_only=True) for path in paths])


def _by_head(tokens: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Rows `[H, N, D]` in float64 of tokens `[N, H_q, D]`: the queries of a group follow each
    other."""
    return tokens.unflatten(1, (kv_heads, -1)).transpose(0, 1).flatten(1, 2).double()


def _difference(bench: Bench, dumped: Dumped) -> float:
    """The largest relative difference between an eigenvalue of the old way and ours. It says that
    both compute the same."""
    rotations = fit(bench.collect(_PUBLISHED), _PUBLISHED, bench.geometry)
    worst = 0.0
    for layer, sides in dumped.eigenvalues.items():
        fitted = rotations[layer]
        for side, eigenvalues in sides.items():
            ours = getattr(fitted, side).eigenvalues[0].double().cpu()
            worst = max(worst, ((ours - eigenvalues).abs() / eigenvalues).max().item())
    return worst


def old_way_lines(result: dict[str, Any]) -> list[str]:
    """What a reader wants to know of it."""
    old, measured = result["old"], len(result["measured_layers"])
    layer = old["seconds_per_layer"]
    split = ", ".join(f"{name} {seconds:.2f}" for name, seconds in layer.items())
    lines = [
        f"old way      {old['seconds']:7.1f} s  {old['bytes_written'] / 1e9:5.1f} GB written, "
        f"host memory {_host(old)}",
        f"  forward passes {old['forward_seconds']:.2f} s, then a layer: {split} s",
    ]
    if measured < result["layers"]:
        lines.append(f"  measured for {measured} layers, scaled to {result['layers']}")
    for name, way in result["ours"].items():
        lines.append(
            f"{name:12} {way['seconds']:7.1f} s    0.0 GB written, host memory {_host(way)}, "
            f"the old way takes {result['ratio'][name]:.1f} x as long"
        )
    lines.append(
        f"largest relative difference of an eigenvalue: {result['eigenvalue_difference']:.1e}"
    )
    return lines


def _host(way: dict[str, Any]) -> str:
    added = way["host_peak_bytes"] - way["host_bytes_before"]
    return f"+{added / 1e9:.2f} GB (peak {way['host_peak_bytes'] / 1e9:.2f} GB)"
