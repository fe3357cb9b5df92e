"""What statistics cost on a GPU, and how exact they are: a model in the geometry of Qwen3-8B with
random weights, made on the device.

    python scripts/benchmark_statistics.py [--shape 8b] [--tokens 32768] [--length 4096]
                                           [--batch 4] [--repeats 5] [--runs 64,128,256,512,1024]

One run measures the plain decoder forward, `collect` of the recipe `oscar`, `key_energy` (two
passes, against two plain forwards), the float64 definition that takes one row at a time, and `fit`
of all layers. FLOP utilisation is that of a large bf16 product in the same run. Second moments and
smallest eigenvalues are compared with float64 on the activations of one layer, for several lengths
of runs. `--layers 2 --tokens 512 --length 256` tries it on a CPU.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from unittest.mock import patch

import torch
from scale_models import (
    DEVICE,
    interleave,
    make_model,
    matmul_peak,
    measure_peak,
    median_ratio,
    random_text,
    seconds_of,
    shape_of,
)
from transformers import PreTrainedModel

from rotationzoo.calibration.collect import collect
from rotationzoo.calibration.fit import fit
from rotationzoo.calibration.memory import Footprint
from rotationzoo.linalg import run_sums
from rotationzoo.linalg.moments import Moment
from rotationzoo.model.capture import capture, decoder
from rotationzoo.model.geometry import Geometry, geometry_of
from rotationzoo.recipe import PRESETS, Data


@contextmanager
def float64_definition() -> Iterator[None]:
    """Inside the block, products are formed in float64, one row of text at a time."""
    with patch.object(run_sums, "on_tensor_cores", lambda rows: False):
        yield


@torch.no_grad()
def forward(model: PreTrainedModel, batches: list[torch.Tensor]) -> None:
    for ids in batches:
        decoder(model)(input_ids=ids, use_cache=False)


def rows_of_layer(
    model: PreTrainedModel, geometry: Geometry, batches: list[torch.Tensor], index: int
) -> dict[str, torch.Tensor]:
    """Kind -> rows `[KV heads, N, D]` that one layer's attention reads and writes, sink left
    out."""
    kept: dict[str, list[torch.Tensor]] = {}
    kv_heads = geometry[index].kv_heads

    def keep(layer: int, *tensors: torch.Tensor) -> None:
        if layer != index:
            return
        for kind, tensor in zip(("query", "key", "value", "output"), tensors, strict=True):
            by_head = tensor[:, :, 64:].unflatten(1, (kv_heads, -1)).transpose(0, 1)
            kept.setdefault(kind, []).append(by_head.flatten(1, 3))

    with capture(model, keep):
        forward(model, batches)
    return {kind: torch.cat(parts, 1) for kind, parts in kept.items()}


def errors_of_runs(rows: torch.Tensor, run: int) -> dict[str, float]:
    """Second moment and eigenvalues of rows `[H, N, D]` against those of float64: the largest
    relative error of any eigenvalue and of the smallest one, and the norm of the difference."""
    heads, _, dim = rows.shape
    exact, fast = (Moment.zeros(heads, dim, rows.device) for _ in range(2))
    for head in range(heads):  # one float64 copy at a time
        part = Moment.zeros(1, dim, rows.device)
        part.add(rows[head : head + 1])
        exact.second[head], exact.first[head] = part.second[0], part.first[0]
        exact.weight[head] = part.weight[0]
    run_sums.add_runs(fast, rows, run=run)
    expected, measured = exact.second_moment, fast.second_moment
    wanted = torch.linalg.eigvalsh(expected.cpu())
    relative = (torch.linalg.eigvalsh(measured.cpu()) / wanted - 1).abs()
    return {
        "smallest_eigenvalue": relative[:, 0].max().item(),
        "any_eigenvalue": relative.max().item(),
        "norm": ((measured - expected).norm() / expected.norm()).item(),
        "mean": ((fast.mean - exact.mean).norm() / exact.mean.norm()).item(),
        "smallest_over_mean_eigenvalue": (wanted[:, 0] / wanted.mean(1)).min().item(),
    }


def widen(rows: torch.Tensor, spread: float = 1e-3) -> torch.Tensor:
    """Rows of the same type with a spectrum like a trained model's, where a random one's is flat:
    channels mixed, and scaled from 1 down to `spread`."""
    dim = rows.shape[-1]
    generator = torch.Generator().manual_seed(0)
    mixing, _ = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64))
    scales = torch.logspace(0, torch.tensor(spread).log10().item(), dim)
    transform = (mixing.float() * scales) @ mixing.float().mT
    return (rows.float() @ transform.to(rows.device)).to(rows.dtype)


def measure_errors(
    rows: dict[str, torch.Tensor], runs: list[int]
) -> dict[str, dict[int, dict[str, float]]]:
    """Kind -> length of runs -> errors; `wide` are queries with a wide spectrum."""
    rows = {**rows, "wide": widen(rows["query"])}
    errors = {}
    for kind, tensor in rows.items():
        errors[kind] = {run: errors_of_runs(tensor, run) for run in runs}
        for run, error in errors[kind].items():
            listed = ", ".join(f"{name} {value:.1e}" for name, value in error.items())
            print(f"{kind:7s} runs of {run:5d}: {listed}")
    return errors


def time_runs(rows: dict[str, torch.Tensor], runs: list[int]) -> dict[int, float]:
    """Length of runs -> milliseconds to add one layer's four kinds of rows."""
    milliseconds = {}
    for run in runs:

        def add(run: int = run) -> None:
            for tensor in rows.values():
                moment = Moment.zeros(tensor.shape[0], tensor.shape[-1], tensor.device)
                run_sums.add_runs(moment, tensor, run=run)

        add()
        milliseconds[run] = 1e3 * statistics.median(seconds_of(add) for _ in range(5))
        print(f"one layer, runs of {run:5d}: {milliseconds[run]:.2f} ms")
    return milliseconds


def time_eigh(layers: int, heads: int, dim: int) -> dict[str, float]:
    """Seconds of the eigenbases of both sides of all layers: layer by layer on the CPU as `fit`
    takes them, in eight threads, and at once on the device."""
    generator = torch.Generator().manual_seed(0)
    factors = torch.randn(2 * layers, heads, 2 * dim, dim, generator=generator, dtype=torch.float64)
    moments = factors.mT @ factors
    on_device = moments.to(DEVICE)

    def in_threads() -> None:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(torch.linalg.eigh, moments))

    ways: dict[str, Callable[[], object]] = {
        "one after another": lambda: [torch.linalg.eigh(moment) for moment in moments],
        "in 8 threads": in_threads,
        f"at once on {DEVICE}": lambda: torch.linalg.eigh(on_device),
    }
    seconds = {}
    for way, job in ways.items():
        job()
        seconds[way] = seconds_of(job)
        print(f"eigh of {2 * layers * heads} matrices of {dim} {way}: {seconds[way]:.2f} s")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--runs", default="64,128,256,512,1024")
    parser.add_argument("--json", action="store_true", help="print one object at the end")
    args = parser.parse_args()
    shape = shape_of(args.shape, args.layers)
    rows = args.tokens // args.length
    model = make_model(shape)
    batches = list(random_text(shape, rows, args.length).split(args.batch))
    with torch.no_grad():
        geometry = geometry_of(model, batches[0][:1, :32])
    recipe, two_passes = PRESETS["oscar"], PRESETS["oscar-v1"]
    peak = matmul_peak()
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    print(
        f"{shape.source}, {shape.layers} layers, random bf16 weights, {args.tokens} tokens in rows "
        f"of {args.length}, batch {args.batch}, {name}, torch {torch.__version__}; "
        f"a bf16 product runs at {peak / 1e12:.0f} TFLOP/s"
    )

    jobs: dict[str, Callable[[], object]] = {
        "forward": lambda: forward(model, batches),
        "collect": lambda: collect(model, geometry, batches, recipe),
        "key_energy": lambda: collect(model, geometry, batches, two_passes),
    }
    times = interleave(jobs, args.repeats)
    with float64_definition():
        definition = interleave(
            {"forward": jobs["forward"], "definition": jobs["collect"]}, max(1, args.repeats // 2)
        )
    forward_flops = shape.forward_flops(rows, args.length)
    moment_flops = shape.moment_flops(rows, args.length)
    results = {
        "collect": (times, "collect", 1, forward_flops + moment_flops),
        "key_energy": (times, "key_energy", 2, 2 * forward_flops + moment_flops),
        "float64": (definition, "definition", 1, forward_flops + moment_flops),
    }
    plain = statistics.median(times["forward"])
    print(
        f"forward     {plain:6.3f} s  {args.tokens / plain:8.0f} tokens/s  "
        f"{forward_flops / plain / peak:4.0%} of the product's FLOP/s"
    )
    ratios = {}
    for name, (of_turns, job, passes, flops) in results.items():
        seconds = statistics.median(of_turns[job])
        ratios[name] = median_ratio(of_turns, job, "forward") / passes
        print(
            f"{name:11s} {seconds:6.3f} s  {args.tokens / seconds:8.0f} tokens/s  "
            f"{flops / seconds / peak:4.0%}  {ratios[name]:.3f} x {passes} plain forward(s)"
        )

    with measure_peak() as memory:
        collected = collect(model, geometry, batches, recipe)
    data = Data(tokens=args.tokens, length=args.length)
    planned = Footprint(
        recipe.model_copy(update={"data": data}), geometry, model.config, args.batch, 2, False
    )
    weights = sum(weight.nbytes for weight in model.parameters())
    estimate = weights + 2 * planned.statistics + planned.activations(args.batch)
    print(f"peak of collect {memory.device / 1e9:.2f} GB, planned {estimate / 1e9:.2f} GB")
    fits = [seconds_of(lambda: fit(collected, recipe, geometry)) for _ in range(3)]
    print(f"fit of {len(geometry)} layers {statistics.median(fits):.2f} s")

    eigh = time_eigh(len(geometry), geometry[0].kv_heads, geometry[0].key_dim)

    runs = [int(run) for run in args.runs.split(",")]
    of_layer = rows_of_layer(model, geometry, batches, len(geometry) // 2)
    milliseconds = time_runs(of_layer, runs)
    errors = measure_errors(of_layer, runs)
    print(f"rotationzoo adds runs of {run_sums.RUN}")
    if args.json:
        outcome = {
            "seconds": times | {"definition": definition["definition"]},
            "ratios": ratios,
            "product_flops_per_second": peak,
            "fit_seconds": fits,
            "eigh_seconds": eigh,
            "peak_bytes": memory.device,
            "planned_bytes": estimate,
            "layer_milliseconds": milliseconds,
            "errors": errors,
        }
        print(json.dumps(outcome))


if __name__ == "__main__":
    main()
