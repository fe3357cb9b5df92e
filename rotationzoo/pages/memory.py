"""The section on memory: the bytes of a cache in bfloat16 and in 2 bits."""

from rotationzoo.artifact.evaluation_file import Evaluation
from rotationzoo.artifact.store import Artifact
from rotationzoo.charts.bars import Bar, draw_bars
from rotationzoo.codec import int2
from rotationzoo.model.geometry import Geometry, cached_layers
from rotationzoo.pages.figures import Figure, Section, Table
from rotationzoo.simulation.layout import CacheLayout
from rotationzoo.simulation.size import EXACT_BITS, bits_per_element

CONTEXTS = {8192: "8K", 32768: "32K", 131072: "128K"}
_DEFAULT = "sglang"  # where nothing was evaluated


def describe_memory(artifact: Artifact, evaluation: Evaluation | None) -> Section:
    """What a cache of some lengths takes, as figures that follow from shapes alone."""
    name = evaluation.format if evaluation else _DEFAULT
    if name not in int2.FORMATS:
        name = _DEFAULT
    elements = count_elements(artifact.geometry)
    exact = elements * EXACT_BITS / 8
    bars, rows = [], []
    layout = CacheLayout.of_recipe(artifact.recipe, int2.FORMATS[name])
    for context, label in CONTEXTS.items():
        bits = bits_per_element(artifact.geometry, layout, context)
        here = elements * bits / 8
        for what, bytes_per_token in (("bf16", exact), ("2 bits", here)):
            total = bytes_per_token * context
            bars.append(
                Bar(
                    f"{label} {what}",
                    total / 2**20,
                    describe_bytes(total),
                    what != "bf16",
                )
            )
        rows.append(
            [
                f"{context:,}",
                f"{exact:,.0f}",
                f"{here:,.0f}",
                describe_bytes(exact * context),
                describe_bytes(here * context),
                f"{exact / here:.1f} times",
            ]
        )
    about = (
        f"Of one request in the format {name}, with the first {layout.sink} and the last "
        f"{layout.recent} tokens in bfloat16, from the shapes of the model's keys and values. "
        "Layers with a sliding window keep fewer tokens than this: rotationzoo plan counts them."
    )
    columns = [
        "tokens",
        "bf16, bytes a token",
        "2 bits, bytes a token",
        "bf16",
        "2 bits",
        "smaller",
    ]
    chart = draw_bars(bars, "MiB")
    figure = Figure("memory", "Memory of the cache", chart, Table(columns, rows))
    return Section("memory", "Memory saved", [about], [figure])


def count_elements(geometry: Geometry) -> int:
    """The elements that all layers cache of one token."""
    sizes = [
        layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in cached_layers(geometry)
    ]
    return sum(sizes)


def describe_bytes(size: float) -> str:
    """A number of bytes in the largest unit of which there is at least one."""
    for unit, count in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= count:
            return f"{size / count:.3g} {unit}"
    return f"{size:.0f} bytes"
