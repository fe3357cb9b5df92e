"""`rotationzoo inspect`: show what each layer's statistics look like."""

from dataclasses import asdict
from typing import TYPE_CHECKING

from rotationzoo.cli.next_steps import suggest_step
from rotationzoo.cli.options import ArtifactFolder
from rotationzoo.cli.output import Output, say, table
from rotationzoo.figures import number
from rotationzoo.sides import read_as

if TYPE_CHECKING:
    from rotationzoo.artifact.store import Artifact
    from rotationzoo.report.spectra import LayerSpectra, SideSpectrum


def inspect_command(artifact: ArtifactFolder, out: Output) -> None:
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
    out.result(data, opened.identity, lambda: _show_layers(opened, layers))
    suggest_step(out, opened)


def _show_layers(artifact: "Artifact", layers: list["LayerSpectra"]) -> None:
    """The sides beside each other, no wider than a terminal."""
    columns = ["layer", "heads"]
    # `LayerSpectra` has what is read as both as keys and as values.
    sides = {side: read_as(side)[0] for side in artifact.rotations.cached.sides}
    for side in sides:
        columns += [f"{side[0].upper()} dim", "rank", "top1", "top8"]
    rows = []
    for layer in layers:
        error = max(layer.key.orthogonality_error, layer.value.orthogonality_error)
        cells = [str(layer.layer), str(layer.kv_heads)]
        for place in sides.values():
            spectrum: SideSpectrum = getattr(layer, place)
            top = [number(share, ".1%") for share in (spectrum.top_1_share, spectrum.top_8_share)]
            cells += [str(spectrum.dim), number(spectrum.effective_rank, ".1f"), *top]
        rows.append([*cells, f"{error:.0e}"])
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
        ranges = []
        for side, place in sides.items():
            shares = [getattr(layer, place).feedback for layer in layers]
            ranges.append(f"{side}s {min(shares):.0%} to {max(shares):.0%}")
        expected = "of the errors of nearest codes are expected to be left"
        say(f"Error feedback: {' and '.join(ranges)} {expected}")
    if artifact.rotations.has_budget:
        for side, place in sides.items():
            bits = " ".join(f"{getattr(layer, place).bits:g}" for layer in layers)
            say(f"Bits a channel of {side}s, layer by layer: {bits}")
