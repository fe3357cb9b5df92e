"""Time and memory of long rows: calibration, evaluation and a recall prompt at the geometry of
Qwen3-8B, with random weights made on the device and YaRN.

    python scripts/benchmark_long.py [--layers 12] [--lengths 32768,131072] [--parts all]
                                     [--queries 32]

Of each length, one row: `collect` with the recipe oscar; the losses of the exact model; one arm
while decoding and in prefill chunks of 2,048, with attention KL and block errors; and the answers
of a prompt through the exact cache and through the arm. `collect` has its estimate as well.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from scale_models import (
    DEVICE,
    GB,
    SHAPES,
    Shape,
    make_model,
    measure_peak,
    random_text,
    seconds_of,
    weight_bytes,
)
from transformers import PretrainedConfig, PreTrainedModel

from rotationzoo.calibration.collect import collect
from rotationzoo.calibration.fit import fit
from rotationzoo.calibration.memory import Footprint
from rotationzoo.evaluation.forward import attention_modules, token_losses
from rotationzoo.evaluation.metrics import Buckets, Metrics
from rotationzoo.model.capture import decoder
from rotationzoo.model.geometry import Geometry, geometry_of
from rotationzoo.model.rope import apply_scaling, scaling_of
from rotationzoo.recall.answers import read_answers
from rotationzoo.recall.prompts import Prompt, Question
from rotationzoo.recipe import PRESETS, Data
from rotationzoo.simulation.arm import Arm
from rotationzoo.simulation.layout import CacheLayout
from rotationzoo.simulation.simulated import Simulation

# As the model's card on huggingface.co recommends for 131,072 tokens.
SCALING = "yarn:4:32768"
CHUNK = 2048


@dataclass(frozen=True)
class LongShape(Shape):
    """A shape whose RoPE is scaled to 131,072 positions."""

    def config(self) -> PretrainedConfig:
        config = super().config()
        apply_scaling(config, SCALING, self.source)
        return config


@dataclass(frozen=True)
class Bench:
    """One length of rows of one model."""

    model: PreTrainedModel
    geometry: Geometry
    arm: Arm
    ids: torch.Tensor
    """A row of token ids `[1, T]`."""
    queries: int

    @property
    def length(self) -> int:
        """T."""
        return self.ids.shape[1]

    def parts(self) -> Iterator[tuple[str, Callable[[], object], int | None]]:
        """Each part's name, what it does, and for calibration its estimated peak in bytes."""
        weights, item = weight_bytes(self.model), self.model.dtype.itemsize
        data = Data(tokens=self.length, length=self.length)
        recipe = PRESETS["oscar"].model_copy(update={"data": data})
        config = self.model.config
        calibration = Footprint(recipe, self.geometry, config, 1, item, DEVICE == "cpu")
        batches = [self.ids]
        yield "plain forward", self.forward, calibration.peak(weights)
        collected = lambda: collect(self.model, self.geometry, batches, recipe)  # noqa: E731
        yield "collect", collected, calibration.peak(weights)
        yield "exact losses", lambda: token_losses(self.model, self.ids, 1), None
        for name, cache in self.caches.items():
            yield f"one arm, {name}", lambda cache=cache: self.measure(cache), None
        yield "prompt, exact", self.answer, None
        yield "prompt, one arm", lambda: self.answer(self.caches["decoding"]), None

    @property
    def caches(self) -> dict[str, CacheLayout]:
        """Both layouts."""
        return {"decoding": CacheLayout(), f"chunks of {CHUNK}": CacheLayout(prefill_chunk=CHUNK)}

    def forward(self) -> None:
        """The decoder alone, with nothing captured."""
        decoder(self.model)(input_ids=self.ids, use_cache=False)

    def simulation(self, cache: CacheLayout, queries: torch.Tensor | None = None) -> Simulation:
        """The model that reads its cache in 2 bits."""
        layers = {layer.index for layer in self.geometry}
        return Simulation(self.arm, cache, self.geometry, layers, queries=queries)

    def measure(self, cache: CacheLayout) -> None:
        """What `evaluate` does with one text and one arm."""
        start = max(each.first_quantized for each in self.caches.values())
        metrics = Metrics(Buckets.between(start, self.length), sorted(self.arm.rotations))
        step = max(1, (self.length - start) // max(self.queries, 1))
        queries = torch.arange(start, self.length, step)[: self.queries]
        modules = attention_modules(self.model, self.ids[:, :8])
        simulation = self.simulation(cache, queries if self.queries else None)
        with simulation.running(self.model, modules, metrics.observers):
            metrics.add_losses(token_losses(self.model, self.ids, start))

    def answer(self, cache: CacheLayout | None = None) -> None:
        """The answers to 8 questions at the end of a prompt, exact or through the arm."""
        ends = range(self.length - 8 * 16, self.length, 16)
        questions = [Question("needles", slice(end + 8, end + 14), 64) for end in ends]
        prompt = Prompt(self.ids[0].cpu(), tuple(questions))
        if cache is None:
            read_answers(self.model, [prompt])
            return
        with self.simulation(cache).running(self.model):
            read_answers(self.model, [prompt])


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--lengths", default="32768,131072")
    parser.add_argument("--parts", default="all", help="words in the names of parts, or all")
    parser.add_argument("--queries", type=int, default=32)
    args = parser.parse_args()
    shape = LongShape(**{**SHAPES["8b"].__dict__, "layers": args.layers})
    run(shape, list(map(int, args.lengths.split(","))), args.parts, args.queries)


def run(shape: Shape, lengths: list[int], parts: str, queries: int) -> None:
    """Print one line for each part of each length."""
    model = make_model(shape)
    geometry = geometry_of(model, random_text(shape, 1, 32))
    arm = Arm("hadamard", fit(None, PRESETS["hadamard"], geometry))
    scaling = scaling_of(model.config)
    print(f"{shape.source}, {shape.layers} layers, {scaling}, {weight_bytes(model) / GB:.1f} GB")
    print("tokens    part                      seconds   peak GB   estimate GB", flush=True)
    for length in lengths:
        bench = Bench(model, geometry, arm, random_text(shape, 1, length), queries)
        for name, job, estimate in bench.parts():
            if parts != "all" and not any(word in name for word in parts.split(",")):
                continue
            with measure_peak() as peak:
                seconds = seconds_of(job)
            most = (peak.device if DEVICE == "cuda" else peak.host) / GB
            expected = "-" if estimate is None else f"{estimate / GB:.2f}"
            print(f"{length:<9,} {name:24s} {seconds:8.2f} {most:9.2f} {expected:>13s}", flush=True)


if __name__ == "__main__":
    main()
