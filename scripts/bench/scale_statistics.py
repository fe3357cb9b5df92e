"""What collecting the statistics of all layers costs beside the plain forward passes of the same
rows, and how long fitting the rotations and measuring what each layer loses take after that."""

import statistics
from dataclasses import asdict, dataclass
from typing import Any

import torch
from measuring import interleave, seconds_of
from scale_models import Shape, device_peak, median_ratio, random_text, weight_bytes
from transformers import PreTrainedModel

from rotationzoo.artifact.fit import fit
from rotationzoo.calibration.collect import collect
from rotationzoo.calibration.sensitivity import LONGEST, measure_sensitivities, write_texts
from rotationzoo.geometry import Geometry
from rotationzoo.linalg.moments import Statistics
from rotationzoo.model.capture import decoder
from rotationzoo.model.geometry import geometry_of
from rotationzoo.progress import silent
from rotationzoo.recipe import Recipe
from rotationzoo.recipe.loading import PRESETS


@dataclass(frozen=True)
class Text:
    """How many rows of which length the model reads, and how many of them at once."""

    tokens: int = 32_768
    length: int = 4096
    batch: int = 4

    @property
    def rows(self) -> int:
        return self.tokens // self.length

    def batches(self, shape: Shape) -> list[torch.Tensor]:
        """Batches `[B, T]` of random token ids."""
        return list(random_text(shape, self.rows, self.length).split(self.batch))


@dataclass(frozen=True)
class Bench:
    """A model with the text that it reads, and what the device can do."""

    name: str
    shape: Shape
    model: PreTrainedModel
    geometry: Geometry
    text: Text
    matmul: float
    """FLOP/s of a large matrix product."""

    @classmethod
    def of(
        cls, name: str, shape: Shape, model: PreTrainedModel, text: Text, matmul: float
    ) -> "Bench":
        ids = random_text(shape, 1, 32)
        return cls(name, shape, model, geometry_of(model, ids), text, matmul)

    @torch.no_grad()
    def forward(self) -> None:
        """The plain forward passes, without the language-model head."""
        for ids in self.text.batches(self.shape):
            decoder(self.model)(input_ids=ids, use_cache=False)

    def collect(self, recipe: Recipe) -> Statistics:
        return collect(self.model, self.geometry, self.text.batches(self.shape), recipe)

    def describe(self) -> dict[str, Any]:
        """Which model it is, and what it read."""
        return {
            "model": self.name,
            "source": self.shape.source,
            "layers": self.shape.layers,
            "weights_bytes": weight_bytes(self.model),
            **asdict(self.text),
        }


def measure_statistics(bench: Bench, repeats: int) -> dict[str, Any]:
    """Times of the recipe `oscar` and of the plain forward passes, in turns."""
    recipe = PRESETS["oscar"]
    rows, length = bench.text.rows, bench.text.length
    totals: Statistics = {}
    peak = device_peak(lambda: totals.update(bench.collect(recipe)))
    jobs = {"forward": bench.forward, "statistics": lambda: bench.collect(recipe)}
    times = interleave(jobs, repeats)
    fits = [seconds_of(lambda: fit(totals, recipe, bench.geometry)) for _ in range(3)]
    rotations = fit(totals, recipe, bench.geometry)
    text = write_texts(random_text(bench.shape, rows, min(LONGEST, length)), recipe, None)
    sensitivities = seconds_of(
        lambda: measure_sensitivities(bench.model, bench.geometry, rotations, text, None, silent)
    )
    forward = bench.shape.forward_flops(rows, length)
    flops = {
        "forward": forward,
        "statistics": forward + bench.shape.moment_flops(rows, length),
    }
    jobs_measured = {}
    for job, seconds in times.items():
        median = statistics.median(seconds)
        jobs_measured[job] = {
            "seconds": seconds,
            "median_seconds": median,
            "tokens_per_second": bench.text.tokens / median,
            "flops": flops[job],
            "flops_per_second": flops[job] / median,
            "utilization": flops[job] / median / bench.matmul,
        }
    return {
        **bench.describe(),
        "jobs": jobs_measured,
        "ratio": median_ratio(times, "statistics", "forward"),
        "fit_seconds": statistics.median(fits),
        "sensitivity_seconds": sensitivities,
        "device_peak_bytes": peak,
    }


def statistics_lines(result: dict[str, Any]) -> list[str]:
    """What a reader wants to know of it."""
    lines = []
    for job, measured in result["jobs"].items():
        lines.append(
            f"{job:12} {measured['median_seconds']:7.2f} s  "
            f"{measured['tokens_per_second']:9,.0f} tokens/s  "
            f"{measured['flops_per_second'] / 1e12:5.0f} TFLOP/s, "
            f"{measured['utilization']:.0%} of a large matrix product"
        )
    lines.append(f"statistics take {result['ratio']:.3f} x the forward passes")
    lines.append(f"fitting all layers then takes {result['fit_seconds']:.2f} s")
    seconds = result["sensitivity_seconds"]
    lines.append(f"a budget of bits takes {seconds:.0f} s more (`--bits`)")
    lines.append(
        f"peak {result['device_peak_bytes'] / 1e9:.1f} GB on the device, "
        f"{result['weights_bytes'] / 1e9:.1f} GB of them weights"
    )
    return lines
