"""Spectra of an artifact, layer by layer: how concentrated its statistics are, and how orthogonal
its rotations; and the sections of a page on them and on clip ratios."""

from dataclasses import dataclass

import torch

from rotationzoo.artifact.store import Artifact
from rotationzoo.linalg.compositions import orthogonality_error, strongest, strongest_first
from rotationzoo.linalg.error_feedback import remaining_share
from rotationzoo.model.geometry import cached_layers
from rotationzoo.report.charts import (
    Axes,
    Bar,
    Colours,
    Point,
    draw_bars,
    draw_bundle,
)
from rotationzoo.report.figures import Figure, Section, draw_by_layer, map_heads
from rotationzoo.report.tables import Table
from rotationzoo.rotations import SIDES, Rotation
from rotationzoo.words import number, percent

_TOP = 8  # strongest directions, whose joint share of the trace is shown
_STATISTICS = {
    "query": "queries that read the keys",
    "key": "keys",
    "output": "attention outputs",
    "value": "values",
    "key_energy": "values, weighted by key energy",
}
_DRAWN = 24  # directions of a spectrum that are drawn, evenly spaced on the logarithmic axis
_LEAST = 1e-9  # of a spectrum's sum; a logarithmic axis has no 0


@dataclass(frozen=True)
class SideSpectrum:
    """One side of a layer, averaged over its matrices.

    `effective_rank` is the exponential of the entropy of the normalised eigenvalues (Roy and
    Vetterli 2007). The shares are fractions of the trace. All three are None where imported files
    have no eigenvalues. `orthogonality_error` is the largest over the matrices.
    """

    dim: int
    effective_rank: float | None
    top_1_share: float | None
    top_8_share: float | None
    orthogonality_error: float
    feedback: float | None = None
    """The share of nearest codes' squared errors, in the metric of the factors, that error feedback
    is expected to leave: the mean over heads. None without factors."""


@dataclass(frozen=True)
class LayerSpectra:
    """One cached layer. `layer` is its index among all layers of the model."""

    layer: int
    kv_heads: int
    key: SideSpectrum
    value: SideSpectrum


def summarize(artifact: Artifact) -> list[LayerSpectra]:
    """One summary per cached layer, in order. Raises `RotationZooError` for a damaged file."""
    summaries = []
    for layer in cached_layers(artifact.geometry):
        rotations = artifact.rotations[layer.index]
        summary = LayerSpectra(
            layer.index,
            layer.kv_heads,
            _summarize_side(rotations.key),
            _summarize_side(rotations.value),
        )
        summaries.append(summary)
    return summaries


def _summarize_side(rotation: Rotation) -> SideSpectrum:
    error = orthogonality_error(rotation.matrix)
    left = None if rotation.feedback is None else remaining_share(rotation.feedback).mean().item()
    if rotation.eigenvalues is None:
        return SideSpectrum(rotation.dim, None, None, None, error, left)
    # Rounding can leave tiny negative eigenvalues.
    shares = rotation.eigenvalues.double().clamp(min=0)
    # The trace is 0 in a layer whose activations are all 0. The clamp avoids dividing by it.
    trace = shares.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    shares = shares / trace
    return SideSpectrum(
        dim=rotation.dim,
        effective_rank=torch.special.entr(shares).sum(-1).exp().mean().item(),
        top_1_share=strongest(shares, 1).mean().item(),
        top_8_share=strongest(shares, _TOP).sum(-1).mean().item(),
        orthogonality_error=error,
        feedback=left,
    )


# ---- sections


def describe_spectra(artifact: Artifact) -> Section:
    """Spectra of the statistics layer by layer, and their effective ranks."""
    title = "Spectra of the statistics"
    layers = summarize(artifact)
    figures = [figure for side in SIDES if (figure := draw_spectrum(artifact, layers, side))]
    if not figures:
        return Section("spectra", title, ["The imported files have no eigenvalues."])
    about = (
        "The fewer directions hold most of a statistic, the more there is for a rotation to "
        "spread. Effective rank: the exponential of the entropy of the eigenvalues' shares, so the "
        "number of directions if all that count were equally strong; the mean over KV heads."
    )
    return Section("spectra", title, [about], [*figures, _draw_ranks(layers)])


def draw_spectrum(artifact: Artifact, layers: list[LayerSpectra], side: str) -> Figure | None:
    """The eigenvalues of every layer as shares of their sum, averaged over heads, largest first.
    None where imported files have none."""
    points, rows = [], []
    for layer in layers:
        eigenvalues = artifact.rotations[layer.layer][side].eigenvalues
        if eigenvalues is None:
            continue
        spectrum: SideSpectrum = getattr(layer, side)
        rank = number(spectrum.effective_rank, ".1f")
        words = f"layer {layer.layer}: effective rank {rank} of {spectrum.dim}"
        for direction, share in _shares(eigenvalues).items():
            points.append(Point(str(layer.layer), direction, share, words))
        shares = [percent(spectrum.top_1_share, 1), percent(spectrum.top_8_share, 1)]
        rows.append([str(layer.layer), str(spectrum.dim), rank, *shares])
    if not points:
        return None
    recipe = artifact.recipe
    statistic = recipe.key_statistic if side == "key" else recipe.value_statistic
    title = f"{side.capitalize()}s: second moment of the {_STATISTICS[statistic]}"
    axes = Axes("direction", "share of the sum", x_scale="log", y_scale="log", percent=True)
    columns = ["layer", "dimension", "effective rank", "first direction", "first 8"]
    return Figure(
        f"spectra-{side}s", draw_bundle(points, axes, "layer"), Table(title, columns, rows)
    )


def _shares(eigenvalues: torch.Tensor) -> dict[int, float]:
    """Direction, counted from 1 -> its share of the sum, the mean over heads of `[H, D]`."""
    values = eigenvalues.double().clamp(min=0)
    total = values.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    shares = strongest_first((values / total).mean(0)).clamp(min=_LEAST)
    places = torch.logspace(0, torch.tensor(len(shares)).log10().item(), _DRAWN).round().int()
    return {place: shares[place - 1].item() for place in places.unique().tolist()}


def _draw_ranks(layers: list[LayerSpectra]) -> Figure:
    lines: dict[str, dict[int, float]] = {}
    for side in SIDES:
        ranks = {layer.layer: getattr(layer, side).effective_rank for layer in layers}
        lines[f"{side}s"] = {layer: rank for layer, rank in ranks.items() if rank is not None}
    table = "effective-ranks", "Effective rank by layer"
    return draw_by_layer(
        table, lines, Axes("layer", "effective rank"), "effective rank {:.1f}", ".1f"
    )


def describe_clips(artifact: Artifact) -> Section:
    """The clip ratios of all heads: bars where heads have the same, else a map for each side."""
    about = (
        "The share of a row's entries, from the smallest magnitude upwards, that stay as they are. "
        "The largest are cut to the magnitude at that place before rounding. A ratio of 1 cuts "
        "nothing."
    )
    clips: dict[str, dict[int, list[float]]] = {}
    different: dict[str, set[float]] = {}
    for side in SIDES:
        clips[side] = {
            layer: both[side].clip.tolist() for layer, both in artifact.rotations.items()
        }
        different[side] = {clip for row in clips[side].values() for clip in row}
    every = set().union(*different.values())
    if all(len(ratios) == 1 for ratios in different.values()):
        figures = [_draw_same(clips)]
    else:
        colours = Colours("clip ratio", min(every), max(every))
        figures = []
        for side, by_layer in clips.items():
            table = f"clip-ratios-{side}s", f"Clip ratios of {side}s"
            figures.append(map_heads(table, f"{side}s", by_layer, colours, "clip ratio "))
    return Section("clip-ratios", "Clip ratios", [about], figures)


def _draw_same(clips: dict[str, dict[int, list[float]]]) -> Figure:
    bars, rows = [], []
    for side, by_layer in clips.items():
        ratio = next(iter(by_layer.values()))[0]
        bars.append(Bar(f"{side}s", ratio, f"{ratio:g}, all heads", accent=True))
        rows.append([f"{side}s", f"{ratio:g}"])
    chart = draw_bars(bars, "clip ratio", (0, 1))
    title = "Clip ratios, the same in all layers and heads"
    return Figure("clip-ratios", chart, Table(title, ["", "clip ratio"], rows))
