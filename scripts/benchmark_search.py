"""How long the search of the preset `best` takes, and where, at the geometry of a published model.

    python scripts/benchmark_search.py [--shape 8b] [--gpus 1] [--layers N] [--steps N]
        [--tokens N] [--prompts N] [--profile] [--output FILE]

The weights are random, in bfloat16 and made on the device, and the text is random token ids in rows
as the preset cuts them. The statistics are collected, then the search runs as in a job, but for the
tokenizer: a model of random weights answers no question, so `--prompts` prompts of 2,048 random
tokens are timed by themselves. Printed are the seconds of each stage and part, the tokens that
passed the model for each purpose, and the peak memory beside its estimate; with `--profile`, the
slowest kernels of learning and of scoring, too.
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from loading import DEVICE
from scale_models import SHAPES, make_model, shape_of
from transformers import PreTrainedModel

from rotationzoo.calibration.collect import collect
from rotationzoo.calibration.equalizing import add_projections
from rotationzoo.calibration.fit import fit
from rotationzoo.calibration.machine import total_memory
from rotationzoo.calibration.memory import Footprint
from rotationzoo.calibration.passes import Passes
from rotationzoo.calibration.search import answer_loss, layer, layers, learn, model_divergence, run
from rotationzoo.calibration.search.layer import LayerSearch
from rotationzoo.calibration.search.memory import LayerFootprint, TextLengths
from rotationzoo.calibration.search.model_divergence import ModelDivergence
from rotationzoo.calibration.search.run import search_rotations
from rotationzoo.calibration.search.scoring import Scorer
from rotationzoo.calibration.search.task import SearchTask
from rotationzoo.model.foldable import with_equalizing
from rotationzoo.model.geometry import Geometry, geometry_of
from rotationzoo.model.loading import on_meta
from rotationzoo.recall.answers import read_answers
from rotationzoo.recall.prompts import Prompt, Question
from rotationzoo.recipe import PRESETS, Recipe

PROMPT_TOKENS, ANSWER_TOKENS, QUESTIONS = 2048, 6, 8
BATCH = 4  # rows per forward pass
# Of the functions whose time is told: module or class, name, and what it is told as.
PARTS: list[tuple[Any, str, str]] = [
    (run, "fit_variants", "fit the variants"),
    (layers, "output_projections", "trace projections"),
    (layers, "take_samples", "take samples"),
    (layers, "_read_projections", "read projections"),
    (LayerSearch, "rank", "rank closed forms"),
    (LayerSearch, "settle", "score what was learned"),
    (LayerSearch, "_load_samples", "- load samples"),
    (layers, "start_in_threads", "closed forms"),
    (Scorer, "__init__", "- read chosen keys"),
    (Scorer, "score", "- score"),
    (layers, "learn_side", "learn"),
    (learn, "_mean_energy", "- energy"),
    (ModelDivergence, "measure", "divergence of predictions"),
    (model_divergence, "run_decoder", "- passes"),
    (model_divergence, "_mean_divergence", "- compare predictions"),
]


class Clock:
    """Seconds and calls by name, each with the device's work in it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self.stage = "statistics"
        self._stage_started = now()

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        started = now()
        try:
            yield
        finally:
            self.seconds[name] += now() - started
            self.calls[name] += 1

    def enter(self, stage: str, done: int = 0, total: int = 0) -> None:
        """The `Progress` of a search, which tells the stages apart."""
        if stage == self.stage:
            return
        ended = now()
        seconds = ended - self._stage_started
        self.seconds[f"stage: {self.stage}"] += seconds
        self.calls[f"stage: {self.stage}"] += 1
        print(f"{self.stage}: {seconds:.1f} s", flush=True)
        self._stage_started, self.stage = ended, stage

    def wrap(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            with self.running(name):
                return function(*arguments, **options)

        return timed


def main() -> None:
    options = parse_arguments()
    clock = Clock()
    recipe = make_recipe(options)
    with clock.running("stage: make the model"):
        model, geometry = make_searchable(options)
    layers, name = len(geometry), shape_of(options.shape).source
    print(f"{options.gpus} x {describe_device()}, {layers} layers of {name}, {torch.__version__}")
    weights = sum(parameter.nbytes for parameter in model.parameters())
    passes = Passes()
    reset_peak()
    with passes.counting(model):
        task = make_task(model, geometry, recipe, clock, passes)
        patches = [patch.object(place, name, clock.wrap(getattr(place, name), told))
                   for place, name, told in PARTS]  # fmt: skip
        for one in patches:
            one.start()
        try:
            result = search_rotations(task, progress=clock.enter)
        finally:
            for one in patches:
                one.stop()
    clock.enter("done")
    peaks = [torch.cuda.max_memory_allocated(gpu) for gpu in range(torch.cuda.device_count())]
    memory = total_memory(DEVICE == "cpu", spread=options.gpus > 1)
    needs = Footprint(recipe, geometry, model.config, BATCH, 2, DEVICE == "cpu", memory)
    report = {
        "device": describe_device(), "gpus": options.gpus, "torch": torch.__version__,
        "model": name, "layers": layers,
        "seconds": round_all(clock.seconds), "calls": dict(clock.calls),
        "tokens_passed": dict(passes.tokens), "weights_bytes": weights,
        "peak_bytes_by_gpu": peaks, "peak_bytes": sum(peaks),
        "estimated_peak_bytes": needs.peak(weights), "search_estimate_bytes": needs.search_peak(),
        "record": {"taken": result.record["choice"]["taken"]},
    }  # fmt: skip
    report["prompts"] = time_prompts(task, options) if options.prompts else {}
    show(report)
    if options.output:
        options.output.write_text(json.dumps(report) + "\n", encoding="utf-8")
    if options.profile:
        profile_learning(task)
        time_decompositions()
    print(json.dumps(report))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--gpus", type=int, default=1, help="over which the layers are spread")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--steps", type=int, help="steps of learning; those of the preset")
    parser.add_argument("--tokens", type=int, help="tokens of text; those of the preset")
    parser.add_argument("--prompts", type=int, default=4, help="prompts that are timed")
    parser.add_argument("--profile", action="store_true", help="print the slowest kernels, too")
    parser.add_argument("--output", type=Path, help="a file for the JSON")
    return parser.parse_args()


def make_recipe(options: argparse.Namespace) -> Recipe:
    recipe = PRESETS["best"]
    assert recipe.search is not None
    search, data = recipe.search, recipe.data
    if options.steps is not None:
        search = search.model_copy(update={"steps": options.steps})
    if options.tokens is not None:
        data = data.model_copy(update={"tokens": options.tokens})
    return recipe.model_copy(update={"search": search, "data": data})


def make_searchable(options: argparse.Namespace) -> tuple[PreTrainedModel, Geometry]:
    """A model of random weights, and its geometry."""
    shape = shape_of(options.shape, options.layers)
    model = make_model(shape, gpus=options.gpus)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Queries and keys of wide and narrow channels, which a search has something to do with.
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.copy_(torch.logspace(-0.5, 0.5, parameter.numel())[
                    torch.randperm(parameter.numel())
                ])  # fmt: skip
    meta = on_meta(model.config, shape.source)
    return model, with_equalizing(meta, geometry_of(model))


def make_task(
    model: PreTrainedModel, geometry: Geometry, recipe: Recipe, clock: Clock, passes: Passes
) -> SearchTask:
    """Statistics of random rows, and what a job makes of them before it searches."""
    assert recipe.search is not None
    draw = torch.Generator().manual_seed(0)
    vocabulary = model.config.vocab_size
    lengths = recipe.data.row_lengths
    rows = [torch.randint(vocabulary, (length,), generator=draw) for length in lengths]
    count = len(rows) - recipe.search.held_out(len(rows))
    fitted, held_out = rows[:count], rows[count:]
    print(f"{len(fitted)} rows fitted, {len(held_out)} held out; collecting ...", flush=True)
    with clock.running("collect"), passes.of("statistics"):
        statistics = collect(model, geometry, batches_of(fitted, BATCH), recipe)
    clock.enter("composing rotations")
    with clock.running("add projections"):
        add_projections(statistics, model, geometry)
    with clock.running("fit"):
        baseline = fit(statistics, recipe, geometry)
    return SearchTask(
        model, geometry, recipe, statistics, baseline, fitted, held_out, batch=BATCH, passes=passes
    )


def batches_of(rows: list[torch.Tensor], size: int) -> list[torch.Tensor]:
    """Rows of equal length, `size` at a time."""
    by_length: dict[int, list[torch.Tensor]] = {}
    for row in rows:
        by_length.setdefault(len(row), []).append(row)
    return [
        torch.stack(alike[start : start + size])
        for alike in by_length.values()
        for start in range(0, len(alike), size)
    ]


def time_prompts(task: SearchTask, options: argparse.Namespace) -> dict[str, float]:
    """Seconds of a pass over some prompts, exact and through the simulated cache."""
    draw = torch.Generator().manual_seed(1)
    prompts = []
    for _ in range(options.prompts):
        ids = torch.randint(task.model.config.vocab_size, (PROMPT_TOKENS,), generator=draw)
        stops = [PROMPT_TOKENS - number * 2 * ANSWER_TOKENS for number in range(QUESTIONS)]
        questions = [Question("random", slice(stop - ANSWER_TOKENS, stop), 64) for stop in stops]
        prompts.append(Prompt(ids, tuple(reversed(questions))))
    settings = task.model, task.geometry, task.cache, task.recipe.group_size
    loss = answer_loss.AnswerLoss(*settings, prompts, BATCH)
    seconds = {}
    loss.exact.correct[:] = True  # so that every prompt counts
    for name, ask in (
        ("exact", lambda: read_answers(task.model, prompts, BATCH)),
        ("simulated", lambda: loss.measure(task.baseline)),
    ):
        ask()
        started = now()
        ask()
        seconds[name] = round(now() - started, 3)
        if options.profile:
            print_kernels(f"{name} prompts", ask)
    return {"prompts": options.prompts, **seconds}


def profile_learning(task: SearchTask, steps: int = 10) -> None:
    """The kernels of a few steps of learning the keys of as many layers as a search learns at once,
    slowest first."""
    if DEVICE != "cuda":
        return
    lengths = TextLengths([], [2048] * 16)
    needs = LayerFootprint(task.geometry, task.settings, lengths, task.hidden)
    count = min(needs.searched_at_once(task.geometry[0], 2), len(task.geometry))
    draw = torch.Generator(DEVICE).manual_seed(0)
    shape = 32768, 8, 128
    rows = [
        learn.StoredRows(
            torch.randn(shape, generator=draw, device=DEVICE, dtype=torch.bfloat16),
            torch.zeros(shape[1:], device=DEVICE),
        )
        for _ in range(count)
    ]
    metric = torch.cat([task.statistics[at]["query"].second_moment for at in range(count)])
    matrices = torch.cat([task.baseline[at].key.matrix.to(DEVICE) for at in range(count)])
    start = matrices.expand(task.settings.starts, -1, -1, -1).contiguous()
    codec = layer.LayerCodec.from_recipe(task.recipe, task.statistics[0], rows[0].rows.device)
    settings = learn.LearningSettings(steps, task.settings.rate)

    def work() -> None:
        learn.learn_rotations(rows, metric, start, codec.learnable("key", start), settings)

    work()
    started = now()
    work()
    print(f"\nlearning: {steps} steps of {count} layers in {now() - started:.3f} s")
    print_kernels("learning", work)


def print_kernels(name: str, work: Callable[[], Any]) -> Any:
    """What some work returns; its slowest kernels and calls are printed."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    started = now()
    with torch.profiler.profile(activities=activities) as profile:
        result = work()
        seconds = now() - started
    print(f"\n{name}: {seconds:.3f} s while it is profiled")
    table = profile.key_averages()
    print(table.table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=70))
    print(table.table(sort_by="self_cpu_time_total", row_limit=12, max_name_column_width=70))
    return result


def time_decompositions() -> None:
    """Milliseconds of what may run batched on the device, for one layer's and many heads."""
    if DEVICE != "cuda":
        return
    draw = torch.Generator(DEVICE).manual_seed(0)
    magnitudes = torch.randn(98304, 128, generator=draw, device=DEVICE).abs()
    selections: dict[str, Callable[[], object]] = {
        "topk": lambda: magnitudes.topk(13, sorted=False),
        "kthvalue": lambda: magnitudes.kthvalue(116),
        "sort": lambda: magnitudes.sort(-1),
    }
    for name, select in selections.items():
        select()
        started = now()
        for _ in range(10):
            select()
        print(f"{name} of 98,304 rows of 128: {1e2 * (now() - started):.3f} ms", flush=True)
    for count in (24, 288):
        draw = torch.Generator(DEVICE).manual_seed(0)
        square = torch.randn(count, 128, 128, generator=draw, device=DEVICE)
        skew = (square - square.mT) * 1e-2
        eye = torch.eye(128, device=DEVICE)
        left, right = eye - skew, eye + skew
        spd = (square @ square.mT + eye).double()
        on_cpu = spd.cpu()
        jobs: dict[str, Callable[[], object]] = {
            "solve": lambda a=left, b=right: torch.linalg.solve(a, b),
            "inv_ex": lambda a=left: torch.linalg.inv_ex(a),
            "bmm": lambda s=skew: s @ s,
            "eigh f64": lambda s=spd: torch.linalg.eigh(s),
            "cholesky f64": lambda s=spd: torch.linalg.cholesky(s),
            "eigh f64 on the CPU": lambda s=on_cpu: torch.linalg.eigh(s),
        }
        times = []
        for name, job in jobs.items():
            job()
            started = now()
            job()
            times.append(f"{name} {1e3 * (now() - started):.2f}")
        print(f"{count} matrices of 128, ms: {', '.join(times)}", flush=True)


def show(report: dict[str, Any]) -> None:
    print(f"\n{'part':32s} {'seconds':>9s} {'calls':>8s} {'a layer':>9s}")
    for name, seconds in report["seconds"].items():
        calls = report["calls"][name]
        print(f"{name:32s} {seconds:9.3f} {calls:8,d} {seconds / report['layers']:9.3f}")
    print(f"tokens passed: {report['tokens_passed']}")
    print(f"prompts of {PROMPT_TOKENS} tokens, seconds: {report['prompts']}")
    for name in ("weights", "peak", "estimated_peak", "search_estimate"):
        print(f"{name:18s} {report[f'{name}_bytes'] / 1e9:8.2f} GB")


def round_all(numbers: dict[str, float]) -> dict[str, float]:
    return {name: round(number, 3) for name, number in numbers.items()}


def now() -> float:
    """The time when the device has done what it was asked to."""
    if DEVICE == "cuda":
        for gpu in range(torch.cuda.device_count()):
            torch.cuda.synchronize(gpu)
    return time.perf_counter()


def reset_peak() -> None:
    if DEVICE == "cuda":
        for gpu in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(gpu)


def describe_device() -> str:
    return torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"


if __name__ == "__main__":
    main()
