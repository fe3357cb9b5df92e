"""`rotationzoo inspect`: show what each layer's statistics look like."""

from dataclasses import asdict
from typing import TYPE_CHECKING

from rotationzoo.cli.next_steps import suggest_step
from rotationzoo.cli.options import ArtifactFolder, Json, Quiet
from rotationzoo.cli.output import Output, say, table
from rotationzoo.words import number

if TYPE_CHECKING:
    from rotationzoo.artifact.store import Artifact
    from rotationzoo.report.spectra import LayerSpectra, SideSpectrum


def inspect_command(artifact: ArtifactFolder, json: Json = False, quiet: Quiet = False) -> None:
    """Show what each layer's statistics look like."""
    from rotationzoo.artifact.store import Artifact
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
    """Keys and values side by side, or latents, no wider than a terminal."""
    columns, sides = ["layer", "heads"], _sides(artifact)
    for side in sides:
        columns += [f"{side[0].upper()} dim", "rank", "top1", "top8"]
    rows = []
    for layer in layers:
        error = max(layer.key.orthogonality_error, layer.value.orthogonality_error)
        cells = [cell for side in sides.values() for cell in _cells(getattr(layer, side))]
        rows.append([str(layer.layer), str(layer.kv_heads), *cells, f"{error:.0e}"])
    title = f"{artifact.manifest.model.id}, recipe {artifact.recipe.name}"
    table(title, [*columns, "error"], rows)
    say(
        "rank: effective rank of the statistic; top1, top8: share of its strongest directions; "
        "error: largest |R R^T - I|"
    )
    if centered := [side for side in sides if artifact.recipe.centers(side)]:
        names = " and ".join(f"{side}s" for side in centered)
        say(f"Centered: {names} lose the mean of their KV head before they are stored")
    if artifact.rotations.has_feedback:
        say(_feedback_words(layers, sides))
    if artifact.rotations.has_budget:
        say(_budget_words(layers, sides))


def _sides(artifact: "Artifact") -> dict[str, str]:
    """The sides of the artifact's layers, and where `LayerSpectra` has each."""
    return {"latent": "key"} if artifact.rotations.has_latents else {"key": "key", "value": "value"}


def _budget_words(layers: list["LayerSpectra"], sides: dict[str, str]) -> str:
    """One line with the layers to which a budget gives more than 2 bits a channel."""
    more = []
    for layer in layers:
        for side, place in sides.items():
            if (bits := getattr(layer, place).bits) > 2:
                more.append(f"layer {layer.layer} {side}s {bits:g}")
    return f"Bits a channel: {', '.join([*more, 'all others 2'])}"


def _feedback_words(layers: list["LayerSpectra"], sides: dict[str, str]) -> str:
    """One line with the range over layers of what error feedback leaves of squared errors."""
    ranges = []
    for side, place in sides.items():
        shares = [getattr(layer, place).feedback for layer in layers]
        ranges.append(f"{side}s {min(shares):.0%} to {max(shares):.0%}")
    return (
        f"Error feedback: {' and '.join(ranges)} of the errors of nearest codes are expected to be "
        "left"
    )


def _cells(side: "SideSpectrum") -> list[str]:
    return [
        str(side.dim),
        number(side.effective_rank, ".1f"),
        number(side.top_1_share, ".1%"),
        number(side.top_8_share, ".1%"),
    ]
