"""What the scripts share: a loaded model with its geometry and rows of text, and timings of several
jobs side by side."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from rotationzoo.model import loading
from rotationzoo.model.geometry import Geometry, geometry_of
from rotationzoo.model.source import fetch, find
from rotationzoo.recipe import Data
from rotationzoo.text.rows import Corpus, read_corpus

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Loaded:
    """A model on `DEVICE`, and rows of text in its tokens."""

    model: PreTrainedModel
    geometry: Geometry
    text: Corpus

    def batches(self, size: int) -> list[torch.Tensor]:
        """Batches `[B, T]` of token ids on the model's device."""
        return [ids.to(DEVICE) for ids in self.text.batches(size)]


def load(model: str, dtype: torch.dtype, data: Data) -> Loaded:
    """Load a model by its hub id, folder or `demo`, with the text that `data` describes."""
    source = find(model)
    fetch(source)
    loaded = loading.load(source, loading.load_config(source), DEVICE, dtype)
    text = read_corpus(data, loading.load_tokenizer(source))
    with torch.no_grad():
        geometry = geometry_of(loaded, text.rows[0][None, :32].to(DEVICE))
    return Loaded(loaded, geometry, text)


def compare(jobs: dict[str, Callable[[], object]], repeats: int, unit: str) -> None:
    """Run the jobs in turn, several times, and print the median of each over that of the first."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    next(iter(jobs.values()))()  # the first pass pays for allocations
    for _ in range(repeats):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - start)
    base = statistics.median(next(iter(times.values())))
    for name, seconds in times.items():
        spread = ", ".join(f"{second:.2f}" for second in seconds)
        print(f"{name:12s} {statistics.median(seconds) / base:5.2f} x {unit}   ({spread} s)")
