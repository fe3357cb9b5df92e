"""`rotationzoo inspect`: show what an artifact stores of each layer."""

from itertools import product
from typing import TYPE_CHECKING, Any

from rotationzoo.cli.next_steps import suggest_step
from rotationzoo.cli.output import Output, say, table
from rotationzoo.geometry import cached_layers
from rotationzoo.settings import ArtifactFolder
from rotationzoo.sides import read_as
from rotationzoo.words import number

if TYPE_CHECKING:
    from rotationzoo.artifact.store import Artifact
    from rotationzoo.rotations import Rotation


def inspect_command(artifact: ArtifactFolder, out: Output) -> None:
    """Show what an artifact stores of each layer."""
    from rotationzoo.artifact.store import Artifact

    opened = Artifact.open(artifact)
    layers = summarize(opened)
    data = {
        "artifact": str(artifact),
        "identity": opened.identity,
        "model": opened.manifest.model.id,
        "recipe": opened.recipe.name,
        "layers": layers,
    }
    out.result(data, opened.identity, lambda: _show_layers(opened, layers))
    suggest_step(out, opened)


def summarize(artifact: "Artifact") -> list[dict[str, Any]]:
    """What is stored for each cached layer: latents twice, as key and as value."""
    layers = []
    for layer in cached_layers(artifact.geometry):
        rotations = artifact.rotations[layer.index]
        sides = {"key": _describe(rotations.key), "value": _describe(rotations.value)}
        layers.append({"layer": layer.index, "kv_heads": layer.kv_heads, **sides})
    return layers


def _describe(rotation: "Rotation") -> dict[str, Any]:
    """One side of a layer: the largest error of its KV heads, and the bits a channel, if known."""
    from rotationzoo.linalg.orthogonality import orthogonality_error

    widths = rotation.widths
    bits = None if widths is None else widths.double().mean().item()
    return {
        "dim": rotation.dim,
        "orthogonality_error": orthogonality_error(rotation.matrix),
        "clip_ratios": rotation.clip.tolist(),
        "bits": bits,
    }


def _show_layers(artifact: "Artifact", layers: list[dict[str, Any]]) -> None:
    """A row for each side of each layer."""
    columns = ["layer", "side", "KV heads", "channels", "bits a channel", "|R R^T - I|"]
    sides, rows = artifact.rotations.cached.sides, []
    for layer, side in product(layers, sides):
        stored = layer[read_as(side)[0]]  # what is read as both is there as keys and as values
        cells = [str(layer["layer"]), side, str(layer["kv_heads"]), str(stored["dim"])]
        error = f"{stored['orthogonality_error']:.0e}"
        rows.append([*cells, number(stored["bits"], ".3g"), error])
    table(f"{artifact.manifest.model.id}, recipe {artifact.recipe.name}", columns, rows)
    say("bits a channel: by a budget, without scales; |R R^T - I|: its largest entry")
    if centered := [side for side in sides if artifact.recipe.centers(side)]:
        names = " and ".join(f"{side}s" for side in centered)
        say(f"Centered: {names} lose the mean of their KV head before they are stored")
