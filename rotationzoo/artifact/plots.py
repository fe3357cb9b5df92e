"""The two plots on a model card: the spectra of the statistics, and the error by layer."""

import io
from typing import Annotated, Any

import torch
from pydantic import Field

from rotationzoo.artifact.results import Count
from rotationzoo.artifact.store import EVALUATION, Artifact
from rotationzoo.artifact.writer import add_files
from rotationzoo.errors import RotationZooError
from rotationzoo.linalg.compositions import strongest_first
from rotationzoo.model.geometry import cached_layers
from rotationzoo.storage import strict_json
from rotationzoo.storage.files import regular_file
from rotationzoo.storage.strict_json import Strict

SPECTRA, ERROR_BY_LAYER = "spectra.png", "error_by_layer.png"
_LONG = 24  # longer arm names do not fit four to a row of the legend
_TICKS = 8  # layers labelled on the colour bar, about


class _ByLayer(Strict):
    layer: Count
    output_error: float
    attention_kl: float | None


class _LayersOfArm(Strict):
    by_layer: list[_ByLayer]


class _Window(Strict):
    arms: dict[str, _LayersOfArm]


class EvaluationReport(Strict):
    """The part of `evaluation.json` that is plotted."""

    own_arm: str
    windows: Annotated[list[_Window], Field(min_length=1)]


def add_pictures(artifact: Artifact) -> Artifact:
    """Add the plots to an artifact. The error plot needs an evaluation that was run with `--save`.

    Raises `RotationZooError` if matplotlib is not installed.
    """
    pictures = {SPECTRA: _spectra(artifact)}
    if EVALUATION in artifact.manifest.files:
        path = regular_file(artifact.folder, EVALUATION)
        # The plots read the plain JSON; validation guarantees the keys that they rely on.
        strict_json.validate(EvaluationReport, evaluation := strict_json.read(path), str(path))
        pictures[ERROR_BY_LAYER] = _error_by_layer(evaluation)
    return add_files(artifact, pictures, {})


_STATISTICS = {
    "query": "queries that read the keys",
    "key": "keys",
    "output": "attention outputs",
    "value": "values",
    "key_energy": "values, weighted by key energy",
}


def _spectra(artifact: Artifact) -> bytes:
    """Plot the eigenvalues of every layer as shares of their sum, averaged over heads, largest
    first."""
    figure, axes = _figure(2)
    recipe, rotations = artifact.recipe, artifact.rotations
    layers = [layer.index for layer in cached_layers(artifact.geometry)]
    colours = _colours(layers)
    for axis, side in zip(axes, ("key", "value"), strict=True):
        for layer in layers:
            stored = rotations[layer][side].eigenvalues
            if stored is None:  # imported files may have none
                continue
            eigenvalues = stored.double().clamp(min=1e-30)  # the axis is logarithmic
            shares = strongest_first((eigenvalues / eigenvalues.sum(-1, keepdim=True)).mean(0))
            axis.plot(
                torch.arange(1, len(shares) + 1), shares, color=colours.to_rgba(layer), linewidth=1
            )
        statistic = _STATISTICS[recipe.key_statistic if side == "key" else recipe.value_statistic]
        axis.set_title(f"{side}s: second moment of the {statistic}", fontsize=10)
        axis.set(xlabel="direction", ylabel="share", xscale="log", yscale="log")
    figure.colorbar(colours, ax=axes, label="layer", ticks=_ticks(layers))
    return _png(figure)


def _error_by_layer(evaluation: dict[str, Any]) -> bytes:
    """Plot the attention block's error and the attention KL divergence by layer, one line per
    arm."""
    figure, axes = _figure(2)
    arms = evaluation["windows"][0]["arms"]
    measures = {"output_error": "error of the attention block", "attention_kl": "attention KL"}
    for axis, (measure, title) in zip(axes, measures.items(), strict=True):
        for name, arm in arms.items():
            measured = {
                row["layer"]: row[measure] for row in arm["by_layer"] if row[measure] is not None
            }
            style: dict[str, Any] = {"marker": ".", "linewidth": 1}
            if name == evaluation["own_arm"]:
                style = {"marker": "o", "linewidth": 2}
            axis.plot(list(measured), list(measured.values()), label=name, **style)
        axis.set_title(title, fontsize=10)
        axis.set(xlabel="layer", yscale="log")
        axis.xaxis.set_major_locator(_whole_numbers())
    lines = axes[0].get_lines()
    columns = 2 if max(map(len, arms)) > _LONG else 4
    figure.legend(lines, list(arms), loc="outside lower center", ncols=columns, fontsize=8)
    return _png(figure)


def _figure(columns: int) -> Any:
    """A figure with one row of axes. Raises `RotationZooError` if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RotationZooError(
            "pictures need matplotlib", hint="install it with: pip install 'rotationzoo[report]'"
        ) from error
    # Avoid pyplot, which may look for a display and keeps figures in a global list.
    figure = Figure(figsize=(5 * columns, 4), layout="constrained")
    return figure, figure.subplots(1, columns)


def _colours(layers: list[int]) -> Any:
    """A colour scale over the layers, from dark to light."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    return ScalarMappable(Normalize(min(layers), max(max(layers), min(layers) + 1)), cmap="viridis")


def _ticks(layers: list[int]) -> list[int]:
    """Evenly spaced layers to label, always including the first and the last."""
    step = -(-len(layers) // _TICKS)
    return sorted({*layers[::step], layers[-1]})


def _whole_numbers() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(integer=True)


def _png(figure: Any) -> bytes:
    out = io.BytesIO()
    # Leave out matplotlib's name and version, so that the same plot always has the same bytes.
    figure.savefig(out, format="png", dpi=120, metadata={"Software": None})
    return out.getvalue()
