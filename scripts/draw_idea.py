"""The drawing of docs/idea.md: one key of the demo model in 2 bits, as it is, rotated, and clipped.

    python scripts/draw_idea.py

It calibrates the demo model with the default recipe, reads 2,048 tokens of held-out text, takes the
KV head whose keys have the widest range, and of its keys the one whose range is the median. It
prints the numbers that the page quotes: over all quantized keys of that head, the median of
(max - min) / rms, and the mean squared error of scores, as a share of the mean squared score.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import altair
import torch
import vl_convert
from loading import load

from rotationzoo import Artifact, calibrate
from rotationzoo.codec.int2 import dequantize, quantize
from rotationzoo.evaluation.compatibility import judged_text
from rotationzoo.model.capture import capture
from rotationzoo.recipe import Data
from rotationzoo.rotations import Rotation

DRAWING = Path(__file__).parents[1] / "docs" / "_static" / "idea.svg"
COLOURS = """<style>
  :root { color: #1b1f24; --back: #ffffff; --stored: #b45309; --exact: #8a94a0; }
  @media (prefers-color-scheme: dark) {
    :root { color: #e6e8eb; --back: #16181c; --stored: #f59e0b; --exact: #7d8794; }
  }
</style><rect width="100%" height="100%" fill="var(--back)"/>"""
ALL_CODES = torch.arange(4)


@dataclass(frozen=True)
class Head:
    """One KV head's rotation, its queries and keys `[N, D]`, and where it is."""

    name: str
    rotation: Rotation
    index: int
    query: torch.Tensor
    key: torch.Tensor

    @property
    def matrix(self) -> torch.Tensor:
        return self.rotation.matrix[self.index]


@dataclass(frozen=True)
class Stored:
    """Keys `[N, D]` in the frame in which they are rounded, what is read back, and the four values
    `[N, 4]` that a channel can have."""

    exact: torch.Tensor
    restored: torch.Tensor
    levels: torch.Tensor
    score_error: float


def read_heads(artifact: Artifact) -> list[Head]:
    """The queries and the keys behind the sink, of each KV head of the demo model."""
    loaded = load("demo", torch.float32, judged_text(Data(tokens=2048, length=2048)))
    heads = []

    def observe(layer: int, query: torch.Tensor, key: torch.Tensor, *_: torch.Tensor) -> None:
        rotation, sink = artifact.rotations[layer].key, artifact.recipe.sink
        groups = query[0].unflatten(0, (key.shape[1], -1)).flatten(1, 2)
        for index, (queries, keys) in enumerate(zip(groups, key[0], strict=True)):
            name = f"layer {layer}, KV head {index}"
            heads.append(Head(name, rotation, index, queries, keys[sink:]))

    with torch.no_grad(), capture(loaded.model, observe):
        loaded.model(loaded.batches(1)[0])
    return heads


def row_range(rows: torch.Tensor) -> torch.Tensor:
    """(max - min) / rms of each row."""
    return (rows.amax(-1) - rows.amin(-1)) / rows.square().mean(-1).sqrt()


def store(head: Head, matrix: torch.Tensor, clip: float) -> Stored:
    """Quantize the keys times an orthogonal matrix, and measure what that does to scores."""
    rows = head.key @ matrix
    quantized = quantize(rows, clip)
    restored = dequantize(quantized)
    levels = (ALL_CODES - quantized.offset) * quantized.scale
    queries = head.query @ matrix
    errors, scores = queries @ (restored - rows).mT, queries @ rows.mT
    share = errors.square().mean() / scores.square().mean()
    return Stored(rows, restored, levels, share.item())


def panel(title: str, stored: Stored, token: int) -> altair.LayerChart:
    """Channels of one key: a stick for what is exact, a dot for what is read back."""
    pairs = zip(stored.exact[token].tolist(), stored.restored[token].tolist(), strict=True)
    rows = [{"channel": i, "exact": a, "read": b} for i, (a, b) in enumerate(pairs)]
    levels = [{"level": level} for level in stored.levels[token].tolist()]
    x = altair.X("channel:Q", title=None, axis=None, scale=altair.Scale(domain=[-1, 64]))
    y = altair.Y("exact:Q", title=None, axis=altair.Axis(tickCount=5, grid=False))
    base = altair.Chart(altair.Data(values=rows))
    lines = altair.Chart(altair.Data(values=levels)).mark_rule(opacity=0.35, color="currentColor")
    sticks = base.mark_bar(size=3, color="var(--exact)").encode(x=x, y=y)
    dots = base.mark_point(size=22, filled=True, color="var(--stored)", opacity=1)
    layers = lines.encode(y="level:Q"), sticks, dots.encode(x=x, y="read:Q")
    heading = altair.Title(title, anchor="start", fontSize=13, fontWeight="normal")
    return altair.layer(*layers).properties(title=heading, width=440, height=110)


def draw(head: Head) -> str:
    """The three panels as SVG."""
    identity, clip = torch.eye(head.key.shape[-1]), head.rotation.clip[head.index].item()
    ranges = row_range(head.key)
    token = int(ranges.argsort()[len(ranges) // 2])
    cases = {
        "As the model computes it": store(head, identity, 1.0),
        "Times the rotation R": store(head, head.matrix, 1.0),
        f"Times R, and clipped at {clip:g}": store(head, head.matrix, clip),
    }
    panels = []
    for name, stored in cases.items():
        width = row_range(stored.exact).median().item()
        print(f"{head.name}, {name}: range {width:.2f}, score error {stored.score_error:.3f}")
        title = f"{name}: squared scores err by {stored.score_error:.0%}"
        panels.append(panel(title, stored, token))
    chart = altair.vconcat(*panels, spacing=18).resolve_scale(y="shared")
    axis = dict.fromkeys(("labelColor", "tickColor", "domainColor"), "currentColor")
    chart = chart.configure(aria=False, background="transparent", padding=12, font="sans-serif")
    chart = chart.configure_axis(**axis).configure_title(color="currentColor")
    svg = vl_convert.vegalite_to_svg(chart.configure_view(stroke=None).to_dict())
    begin = svg.index(">", svg.index("<svg")) + 1
    return svg[:begin] + COLOURS + svg[begin:]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        heads = read_heads(calibrate("demo", output=Path(folder) / "demo"))
    widest = max(heads, key=lambda head: row_range(head.key).median().item())
    DRAWING.write_text(draw(widest), "utf-8")


if __name__ == "__main__":
    main()
