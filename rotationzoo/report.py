"""An artifact -> two pictures for its card: the spectra of its statistics, and the error by layer."""

import io
from typing import Any

import torch

from rotationzoo import artifact, card, strict
from rotationzoo.artifact import Artifact
from rotationzoo.errors import RotationZooError
from rotationzoo.evaluate import EVALUATION
from rotationzoo.files import regular_file
from rotationzoo.geometry import cached_layers, geometry_from_json
from rotationzoo.manifest import EvaluationReport

SPECTRA, ERROR_BY_LAYER = "spectra.png", "error_by_layer.png"


def report(there: Artifact) -> Artifact:
    """Add the pictures to the artifact; that of the error only if it was evaluated with `--save`.

    Raises `RotationZooError` without matplotlib.
    """
    pictures = {SPECTRA: _spectra(there)}
    if EVALUATION in there.manifest["files"]:
        path = regular_file(there.folder, EVALUATION)
        strict.validate(EvaluationReport, evaluation := strict.read(path), str(path))
        pictures[ERROR_BY_LAYER] = _error_by_layer(evaluation)
    return artifact.add(there, pictures, {}, card.render)


def _spectra(there: Artifact) -> bytes:
    """Eigenvalues of every layer, mean over heads, as shares of their sum, largest first."""
    figure, axes = _figure(2)
    rotations = there.rotations()
    layers = cached_layers(geometry_from_json(there.manifest["geometry"]))
    for axis, side, statistic in zip(axes, ("key", "value"), ("queries that read the keys", "attention outputs"), strict=True):
        for number, layer in enumerate(layers):
            stored = rotations.get(f"layers.{layer.index}.{side}.eigenvalues")
            if stored is None:  # of imported files
                continue
            eigenvalues = stored.double().clamp(min=1e-30)
            shares = (eigenvalues / eigenvalues.sum(-1, keepdim=True)).mean(0).flip(0)
            axis.plot(torch.arange(1, len(shares) + 1), shares, color=_shade(number, len(layers)), linewidth=1)
        axis.set(
            title=f"{side}s: second moment of the {statistic}", xlabel="direction", ylabel="share", xscale="log", yscale="log"
        )
    figure.suptitle("dark: first layers, light: last layers", fontsize=8)
    return _png(figure)


def _error_by_layer(evaluation: dict[str, Any]) -> bytes:
    """Error of the attention block and attention KL of every layer, for each arm."""
    figure, axes = _figure(2)
    arms = evaluation["windows"][0]["arms"]
    for name, arm in arms.items():
        layers = [row["layer"] for row in arm["by_layer"]]
        own = name == evaluation["own_arm"]
        style = {"label": name, "marker": "o" if own else ".", "linewidth": 2 if own else 1}
        axes[0].plot(layers, [row["output_error"] for row in arm["by_layer"]], **style)
        if all(row["attention_kl"] is not None for row in arm["by_layer"]):
            axes[1].plot(layers, [row["attention_kl"] for row in arm["by_layer"]], **style)
    axes[0].set(title="error of the attention block", xlabel="layer", yscale="log")
    axes[1].set(title="attention KL", xlabel="layer", yscale="log")
    axes[0].legend(fontsize=8)
    return _png(figure)


def _figure(columns: int) -> Any:
    """A figure and its axes, side by side."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RotationZooError("pictures need matplotlib", hint="install it with: pip install 'rotationzoo[report]'") from error
    figure = Figure(figsize=(5 * columns, 4), layout="constrained")  # no pyplot: no display, no global state
    return figure, figure.subplots(1, columns)


def _shade(number: int, count: int) -> tuple[float, float, float]:
    part = number / max(count - 1, 1)
    return 0.1 + 0.5 * part, 0.2 + 0.5 * part, 0.5 + 0.4 * part


def _png(figure: Any) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=120, metadata={"Software": None})  # the same picture is the same bytes
    return out.getvalue()
