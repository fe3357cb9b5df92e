"""`rotationzoo inspect`: show what each layer's statistics look like."""

from dataclasses import asdict
from typing import TYPE_CHECKING

from rotationzoo.cli.options import ArtifactFolder, Json, Quiet
from rotationzoo.cli.output import Output, say, table

if TYPE_CHECKING:
    from rotationzoo.artifact.store import Artifact
    from rotationzoo.report.spectra import LayerSpectra, SideSpectrum


def inspect_command(artifact: ArtifactFolder, json: Json = False, quiet: Quiet = False) -> None:
    """Show what each layer's statistics look like."""
    from rotationzoo.artifact.store import Artifact
    from rotationzoo.cli.artifact_view import suggest_step
    from rotationzoo.report.spectra import summarize

    opened = Artifact.open(artifact)
    layers = summarize(opened)
    data = {
        "artifact": str(artifact),
        "identity": opened.identity,
        "model": opened.manifest.model.id,
        "recipe": opened.recipe.name,
        "layers": [asdict(layer) for layer in layers],
    }
    out = Output(json, quiet)
    out.result(data, opened.identity, lambda: _show_layers(opened, layers))
    suggest_step(out, opened)


def _show_layers(artifact: "Artifact", layers: list["LayerSpectra"]) -> None:
    """Keys and values side by side, no wider than a terminal."""
    columns = ["layer", "heads"]
    for side in "KV":
        columns += [f"{side} dim", "rank", "top1", "top8"]
    rows = []
    for layer in layers:
        error = max(layer.key.orthogonality_error, layer.value.orthogonality_error)
        sides = [*_cells(layer.key), *_cells(layer.value)]
        rows.append([str(layer.layer), str(layer.kv_heads), *sides, f"{error:.0e}"])
    title = f"{artifact.manifest.model.id}, recipe {artifact.recipe.name}"
    table(title, [*columns, "error"], rows)
    say(
        "rank: effective rank of the statistic; top1, top8: share of its strongest directions; "
        "error: largest |R R^T - I|"
    )
    centered = {"keys": artifact.recipe.center_keys, "values": artifact.recipe.center_values}
    if sides := [side for side, is_centred in centered.items() if is_centred]:
        say(
            f"Centered: {' and '.join(sides)} lose the mean of their KV head before they are stored"
        )
    if artifact.rotations.has_feedback:
        say(_feedback_words(layers))
    if artifact.rotations.has_budget:
        say(_budget_words(layers))


def _budget_words(layers: list["LayerSpectra"]) -> str:
    """One line with the layers to which a budget gives more than 2 bits a channel."""
    more = []
    for layer in layers:
        for side in ("key", "value"):
            if (bits := getattr(layer, side).bits) > 2:
                more.append(f"layer {layer.layer} {side}s {bits:g}")
    return f"Bits a channel: {', '.join([*more, 'all others 2'])}"


def _feedback_words(layers: list["LayerSpectra"]) -> str:
    """One line with the range over layers of what error feedback leaves of squared errors."""
    ranges = []
    for side in ("key", "value"):
        shares = [getattr(layer, side).feedback for layer in layers]
        ranges.append(f"{side}s {min(shares):.0%} to {max(shares):.0%}")
    return (
        f"Error feedback: {' and '.join(ranges)} of the errors of nearest codes are expected to be "
        "left"
    )


def _cells(side: "SideSpectrum") -> list[str]:
    return [
        str(side.dim),
        _number(side.effective_rank, ".1f"),
        _number(side.top_1_share, ".1%"),
        _number(side.top_8_share, ".1%"),
    ]


def _number(value: float | None, format: str) -> str:
    return "-" if value is None else f"{value:{format}}"
