"""Bits by channel beside today's budget, on DEV alone: which keeps more in the same bytes? "Bits by
channel" in docs/history.md.

    python scripts/lab/bits_by_channel.py MODEL ROTATIONS --json OUT [--arms PATTERN ...]

MODEL is a folder of `real_models` or of the lab; ROTATIONS is what `calibrate MODEL` made. Options
are those of `scripts/bench/real_models_lose.py`, which measures the arms: answers of DEV that are
kept, their nats, and the KL of plain text. Every scale counts. Nothing of DEV makes an arm: Fisher
information is that of the bundled calibration text, and of recall prompts hidden in it.

    today           error feedback, the budget of `calibrate --bits`
    factor          the same, its factors made of Fisher information
    text, answers   bits by channel, by the Fisher information of text alone, or of answers alone
    both            of both, with more damping where the name says so
"""

import fnmatch
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from lab_rows import bundled_texts

sys.path.append(str(Path(__file__).parents[1] / "bench"))  # scripts are no package
import real_models_lose as lose
from real_models_lose import Place, Run, Study
from rotationzoo.linalg.error_feedback import factorize

from rotationzoo.artifact.fit import error_metric
from rotationzoo.artifact.store import Artifact
from rotationzoo.budget import Budget
from rotationzoo.calibration.fisher import Scored, collect_fisher, mix
from rotationzoo.calibration.sensitivity import write_texts
from rotationzoo.codec.bit_allocation import spend_bits
from rotationzoo.codec.rotated import RotatedCodec
from rotationzoo.linalg.moments import covariance
from rotationzoo.linalg.transform_coding import DAMPING, decorrelate
from rotationzoo.rotations import Rotation
from rotationzoo.simulation.simulated import SimulatedCodec

BUDGETS = (2.25, 2.5, 3.0, 2.0, 1.75)
DRAWS = {"text": 2, "answers": 4}
Metrics = dict[Place, torch.Tensor]


@dataclass
class Arms:
    """Makes the arms of one model."""

    study: Study
    artifact: Artifact
    fisher: dict[str, Metrics]

    @property
    def averages(self) -> dict[Place, tuple[torch.Tensor, torch.Tensor]]:
        """The mean `[H, D]` and the covariance `[H, D, D]` of the rows of each side."""
        found = {}
        assert self.artifact.statistics is not None
        for layer, kinds in self.artifact.statistics.items():
            for side in ("key", "value"):
                mean, second = kinds[side].mean, kinds[side].second_moment
                assert mean is not None
                found[layer, side] = mean, covariance(second, mean)
        return found

    def metric(self, name: str) -> Metrics:
        """The metric of text, of answers, or of both."""
        if name != "both":
            return self.fisher[name]
        covariances = {place: its for place, (_, its) in self.averages.items()}
        return mix([*self.fisher.values()], covariances)

    def today(self, bits: float, name: str = "") -> SimulatedCodec:
        """Today's budget, its factors by a metric if one is named."""
        rotations, group_size = self.artifact.rotations, self.artifact.recipe.group_size
        metric = self.metric(name) if name else {}

        def factor(layer: int, side: str, rotation: Rotation) -> Rotation:
            return replace(
                rotation, feedback=factorize(error_metric(rotation, metric[layer, side]))
            )

        rotations = rotations.replace(factor) if name else rotations
        return RotatedCodec(
            spend_bits(rotations, Budget(bits=bits), group_size), group_size, rounding="feedback"
        )

    def by_channel(self, bits: float, name: str, damping: float = DAMPING) -> SimulatedCodec:
        """Bits by channel, in the basis and by the costs of a metric."""
        averages, metric = self.averages, self.metric(name)

        def add(layer: int, side: str, rotation: Rotation) -> Rotation:
            mean, spread = averages[layer, side]
            made = decorrelate(spread, metric[layer, side], damping)
            forward, deviations = made.forward.float(), made.deviations.float()
            tensors = {"transform": forward, "deviations": deviations, "costs": made.costs}
            return replace(rotation, mean=mean.float(), **tensors)

        rotations = self.artifact.rotations.replace(add)
        return RotatedCodec(spend_bits(rotations, Budget(bits), None), rounding="transform")

    def every(self) -> Iterator[tuple[str, Callable[[], SimulatedCodec]]]:
        """The names of all arms and how to make them, those that decide first."""
        for bits in BUDGETS:
            yield f"both {bits:g}", partial(self.by_channel, bits, "both")
            yield f"today {bits:g}", partial(self.today, max(2.25, bits))
        for bits in BUDGETS[:2]:
            yield f"factor {bits:g}", partial(self.today, bits, "both")
            for name in ("text", "answers"):
                yield f"{name} {bits:g}", partial(self.by_channel, bits, name)
            for damping in (0.1, 1.0):
                words = f"both, damping {damping:g} {bits:g}"
                yield words, partial(self.by_channel, bits, "both", damping)


def collect(study: Study, artifact: Artifact, rows: Sequence[torch.Tensor]) -> dict[str, Metrics]:
    """The Fisher information of rows `[T]` of text, and of answers to prompts hidden in them."""
    first = study.cache.first_quantized
    texts = [Scored(row, range(first, len(row) - 1)) for row in rows]
    written = write_texts(rows, artifact.recipe, study.tokenizer)
    answers = [Scored(text.ids, text.positions) for text in written]
    return {
        name: collect_fisher(study.model, study.geometry, its, study.cache, DRAWS[name])
        for name, its in {"text": texts, "answers": answers}.items()
    }


def main() -> int:
    parser = lose.make_options()
    parser.description = __doc__
    parser.add_argument("--arms", nargs="+", default=["*"], help="their names, in this order")
    parser.add_argument("--calibration", default="16x3072", help="rows and their tokens")
    parser.add_argument("--fisher", type=Path, help="what was collected, made if missing")
    options, begun = parser.parse_args(), time.perf_counter()
    torch.set_float32_matmul_precision("high" if options.tf32 else "highest")
    (artifact,) = (Artifact.open(folder) for folder in options.rotations)
    study = Study(options)
    torch.manual_seed(0)
    if options.fisher and options.fisher.exists():
        fisher = torch.load(options.fisher, weights_only=True)
    else:
        count, length = map(int, options.calibration.split("x"))
        ids = study.tokenizer("\n".join(bundled_texts("calibration")))["input_ids"]
        rows = torch.tensor(ids[: count * length]).view(count, length)
        fisher = collect(study, artifact, [*rows])
        if options.fisher:
            torch.save(fisher, options.fisher)
    print(f"{lose.DEVICE}, ready after {time.perf_counter() - begun:.0f} s", flush=True)
    run = Run(study, options, begun)
    run.head("Bits by channel and today's budget")
    arms = dict(Arms(study, artifact, fisher).every())
    for pattern in options.arms:
        for name in fnmatch.filter(arms, pattern):
            if not run.is_over:
                run.measure(name, arms[name]())
    print(f"\n{time.perf_counter() - begun:.0f} s{', cut short' if run.is_over else ''}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
