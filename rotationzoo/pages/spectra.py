"""The sections on what the statistics look like: spectra, effective ranks, and clip ratios."""

import torch

from rotationzoo.artifact.spectra import LayerSummary, SideSpectrum, summarize
from rotationzoo.artifact.store import Artifact
from rotationzoo.charts.bars import Bar, draw_bars
from rotationzoo.charts.heat_maps import Cell, Colours, draw_map
from rotationzoo.charts.lines import Axes, Point, draw_bundle, draw_lines
from rotationzoo.linalg.compositions import strongest_first
from rotationzoo.pages.figures import Figure, Section, Table, number, percent
from rotationzoo.rotations import SIDES

_STATISTICS = {
    "query": "queries that read the keys",
    "key": "keys",
    "output": "attention outputs",
    "value": "values",
    "key_energy": "values, weighted by key energy",
}
_DRAWN = 24  # directions of a spectrum that are drawn, evenly spaced on the logarithmic axis
_LEAST = 1e-9  # of a spectrum's sum; a logarithmic axis has no 0


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


def draw_spectrum(artifact: Artifact, layers: list[LayerSummary], side: str) -> Figure | None:
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
        f"spectra-{side}s", title, draw_bundle(points, axes, "layer"), Table(columns, rows)
    )


def _shares(eigenvalues: torch.Tensor) -> dict[int, float]:
    """Direction, counted from 1 -> its share of the sum, the mean over heads of `[H, D]`."""
    values = eigenvalues.double().clamp(min=0)
    total = values.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    shares = strongest_first((values / total).mean(0)).clamp(min=_LEAST)
    places = torch.logspace(0, torch.tensor(len(shares)).log10().item(), _DRAWN).round().int()
    return {place: shares[place - 1].item() for place in places.unique().tolist()}


def _draw_ranks(layers: list[LayerSummary]) -> Figure:
    points, rows = [], []
    for layer in layers:
        row = [str(layer.layer)]
        for side in SIDES:
            spectrum: SideSpectrum = getattr(layer, side)
            rank = spectrum.effective_rank
            row.append(number(rank, ".1f"))
            if rank is not None:
                words = f"layer {layer.layer}, {side}s: effective rank {rank:.1f}"
                points.append(Point(f"{side}s", layer.layer, rank, words))
        rows.append(row)
    chart = draw_lines(points, Axes("layer", "effective rank"))
    table = Table(["layer", "keys", "values"], rows)
    return Figure("effective-ranks", "Effective rank by layer", chart, table)


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
        figures = [_draw_clips(side, by_layer, colours) for side, by_layer in clips.items()]
    return Section("clip-ratios", "Clip ratios", [about], figures)


def _draw_same(clips: dict[str, dict[int, list[float]]]) -> Figure:
    bars, rows = [], []
    for side, by_layer in clips.items():
        ratio = next(iter(by_layer.values()))[0]
        bars.append(Bar(f"{side}s", ratio, f"{ratio:g}, all heads", accent=True))
        rows.append([f"{side}s", f"{ratio:g}"])
    chart = draw_bars(bars, "clip ratio", (0, 1))
    title = "Clip ratios, the same in all layers and heads"
    return Figure("clip-ratios", title, chart, Table(["", "clip ratio"], rows))


def _draw_clips(side: str, by_layer: dict[int, list[float]], colours: Colours) -> Figure:
    cells, rows = [], []
    for layer, clips in by_layer.items():
        for head, clip in enumerate(clips):
            label = f"{side}s, layer {layer}, KV head {head}: clip ratio {clip:g}"
            cells.append(Cell(str(head), str(layer), clip, label))
        rows.append([str(layer), *[f"{clip:g}" for clip in clips]])
    heads = max(map(len, by_layer.values()))
    columns = ["layer", *[f"head {head}" for head in range(heads)]]
    chart = draw_map(cells, "KV head", "layer", colours)
    return Figure(f"clip-ratios-{side}s", f"Clip ratios of {side}s", chart, Table(columns, rows))
