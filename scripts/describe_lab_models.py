"""How heavy-tailed the keys of models are, and how concentrated their queries and outputs, beside
published rotations of large models.

    python scripts/describe_lab_models.py MODEL ... [--published FILE_OR_FOLDER ...]
        [--data FILE] [--tokens 32768]

MODEL is a folder, a hub id or `demo`; `--published` names the files of one pair of rotations, and
can be given several times. Every number is the median over the layers, with their range:

* widest pair: the RMS of the widest RoPE pair of a KV head's keys, divided by the median pair's;
  the largest of the layer's heads;
* kurtosis: of the channels of a KV head's keys, mean(e^2) / mean(e)^2 where e is a channel's mean
  square: 1 if all are equal, D if one has it all; the largest of the layer's heads;
* mean / deviation: the largest of any key channel of the layer;
* for `C_Q` and `C_S`, averaged over a layer's heads: the effective rank (exponential of the
  eigenvalues' entropy, Roy and Vetterli 2007) over D, the shares of the strongest and of the eight
  strongest directions, and the geometric mean of the eigenvalues, damped as for error feedback,
  beside the arithmetic one: for fine steps, what error feedback leaves of squared score errors.
"""

import argparse
import statistics as numbers
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from loading import load

from rotationzoo.calibration.collect import collect
from rotationzoo.engines.import_ import Import, import_
from rotationzoo.linalg.error_feedback import DAMPING
from rotationzoo.linalg.moments import Averages, average
from rotationzoo.recipe import PRESETS, Data

STRONGEST = 8
Columns = dict[str, list[float]]
"""Measure -> its value in each layer."""


def describe_keys(second: torch.Tensor, mean: torch.Tensor) -> dict[str, float]:
    """How heavy-tailed one layer's keys are, from their second moment `[H, D, D]` and their mean
    `[H, D]`."""
    energy = second.diagonal(dim1=-2, dim2=-1)
    pairs = energy.unflatten(-1, (2, -1)).sum(-2).sqrt()
    deviation = (energy - mean**2).clamp(min=1e-12).sqrt()
    measures = {
        "keys: widest pair": pairs.amax(-1) / pairs.median(-1).values,
        "kurtosis": (energy**2).mean(-1) / energy.mean(-1) ** 2,
        "mean / deviation": mean.abs() / deviation,
    }
    return {name: value.max().item() for name, value in measures.items()}


def describe_spectrum(name: str, second: torch.Tensor) -> dict[str, float]:
    """How concentrated a second moment `[H, D, D]` is, averaged over its heads."""
    eigenvalues = torch.linalg.eigvalsh(second.double().mean(0)).clamp(min=0)
    shares = (eigenvalues / eigenvalues.sum()).flip(0)
    damped = shares + DAMPING / len(shares)
    geometric = damped.log().mean().exp()
    return {
        f"{name}: effective rank / D": torch.special.entr(shares).sum().exp().item() / len(shares),
        f"{name}: strongest": shares[0].item(),
        f"{name}: {STRONGEST} strongest": shares[:STRONGEST].sum().item(),
        f"{name}: geometric / arithmetic mean": (geometric / damped.mean()).item(),
    }


def describe_model(model: str, data: Data) -> Columns:
    """All measures of a model on some text."""
    loaded = load(model, torch.float32, data)
    moments = collect(loaded.model, loaded.geometry, loaded.batches(1), PRESETS["oscar"])
    averages = average(moments)
    layers = []
    for kinds in averages.values():
        key = kinds["key"]
        assert key.mean is not None
        spectra = describe_layer(kinds, {"C_Q": "query", "C_S": "output"})
        layers.append(describe_keys(key.second_moment, key.mean) | spectra)
    return columns_of(layers)


def describe_layer(kinds: Mapping, statistics: dict[str, str]) -> dict[str, float]:
    measures = {}
    for name, kind in statistics.items():
        measures |= describe_spectrum(name, kinds[kind].second_moment)
    return measures


def describe_published(files: list[Path]) -> Columns:
    """The spectra that a published pair of rotations keeps."""
    with tempfile.TemporaryDirectory() as work:
        artifact = import_(Import(files, Path(work) / "imported"))
        averages: Averages = artifact.statistics or {}
        recipe = artifact.recipe
        names = {"C_Q": recipe.key_statistic, "C_S": recipe.value_statistic}
        return columns_of([describe_layer(kinds, names) for kinds in averages.values()])


def pair_name(files: list[Path]) -> str:
    """The name of the folder that a pair of rotations lies in."""
    return files[0].name if files[0].is_dir() else files[0].parent.name


def columns_of(layers: list[dict[str, float]]) -> Columns:
    return {name: [layer[name] for layer in layers] for name in layers[0]}


def print_table(models: dict[str, Columns]) -> None:
    names = list(max(models.values(), key=len))
    print(f"| | {' | '.join(names)} |\n|{'---|' * (1 + len(names))}")
    for model, columns in models.items():
        cells = [summarize(columns.get(name)) for name in names]
        print(f"| {model} | {' | '.join(cells)} |")


def summarize(values: list[float] | None) -> str:
    if not values:
        return ""
    return f"{numbers.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--published", type=Path, nargs="+", action="append", default=[])
    parser.add_argument("--data", default="bundled")
    parser.add_argument("--tokens", type=int, default=32768)
    options = parser.parse_args()
    data = Data(source=options.data, tokens=options.tokens)
    described = {Path(name).name: describe_model(name, data) for name in options.models}
    described |= {pair_name(files): describe_published(files) for files in options.published}
    print_table(described)


if __name__ == "__main__":
    main()
