"""Compare the decode kernel with attention in float64 over the rows that the codes stand for.

    python scripts/check_decode.py [--quick] [--purposes formats,lengths] [--jobs 8] [--verbose]
        [--definition]

Needs an NVIDIA GPU and the packages of `rotationzoo[cuda]`, except with `--definition`, which runs
the definition in plain torch. The norm of each request's error must not exceed 2e-3 of the norm of
its output, and that of a single head 4e-3: rounding an output to bfloat16 alone costs 1.7e-3, and
`beyond rounding` is what remains without it.
Every call is repeated, and must return the same. What no query may read is garbage, and freed
memory is full of NaN, so that a read of either shows. Prints the worst error of each group of
cases, and every case that the kernel does not support. Exits 1 if a case fails.

`--quick` runs a few small cases in this process alone, for `compute-sanitizer --tool racecheck` or
`memcheck`.
"""

import argparse
import inspect
import itertools
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib import import_module

import torch
from decode_case_list import PURPOSES, quick
from decode_cases import Case, Drawing, Inputs
from decode_reference import error_of, reference

from rotationzoo.codec import attention
from rotationzoo.errors import RotationZooError

ROW, HEAD = 2e-3, 4e-3
TOGETHER = 12  # cases that a process runs before it is given others


@dataclass(frozen=True)
class Result:
    """What came of one case: two errors, or why it is not supported, or what it stopped with."""

    case: Case
    row: float = 0.0
    head: float = 0.0
    beyond: float = 0.0
    repeats: bool = True
    refused: str = ""
    stopped: str = ""

    @property
    def failed(self) -> bool:
        return not (self.row <= ROW and self.head <= HEAD and self.repeats)


def run(cases: Sequence[Case], definition: bool) -> list[Result]:
    """Run cases one after the other. After an illegal access on the GPU, all that follow fail."""
    results = []
    for case in cases:
        try:
            results.append(check(case, definition))
        except Exception as error:  # whatever a kernel or its compiler may raise
            line = (str(error).splitlines() or [""])[0]
            stopped = f" with {type(error).__name__}: {line}"
            results.append(Result(case, math.inf, math.inf, math.inf, stopped=stopped))
    return results


@torch.inference_mode()
def check(case: Case, definition: bool) -> Result:
    """Run one case twice."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inputs = Drawing(case, device).inputs()
    attend: Callable[..., torch.Tensor] = attention.attend
    why = ""
    if not definition:
        module = import_module("rotationzoo.codec.cuda_attention")
        attend, why = module.attend, unsupported(module, inputs)
    if why:
        return Result(case, refused=why)
    takes_splits = "splits" in inspect.signature(attend).parameters
    options = {"splits": case.splits} if case.splits and takes_splits else {}
    outputs = []
    for _ in range(2):
        poison(device)
        try:
            if case.replayed and device == "cuda":
                outputs.append(replay(attend, inputs))
            else:
                outputs.append(attend(*inputs.arguments(), **options))
        except RotationZooError as refusal:
            return Result(case, refused=str(refusal))
    size = *inputs.query.shape[:3], case.value_dim or case.dim
    assert outputs[0].shape == size, f"{case}: the output is {tuple(outputs[0].shape)}"
    assert outputs[0].dtype == inputs.query.dtype, f"{case}: the output is {outputs[0].dtype}"
    error = error_of(outputs[0], reference(inputs))
    same = torch.equal(*(output.nan_to_num(1e4) for output in outputs))
    return Result(case, error.row, error.head, error.beyond, same)


def replay(attend: Callable[..., torch.Tensor], inputs: Inputs) -> torch.Tensor:
    """The output of a graph that was captured while nothing was packed."""
    lengths, graph = inputs.packed.lengths.clone(), torch.cuda.CUDAGraph()
    inputs.packed.lengths.zero_()
    attend(*inputs.arguments())  # compiles
    with torch.cuda.graph(graph):
        output = attend(*inputs.arguments())
    inputs.packed.lengths.copy_(lengths)
    graph.replay()
    return output.clone()


def unsupported(module: object, inputs: Inputs) -> str:
    """Why the kernel does not take these inputs; empty if it does."""
    supports = getattr(module, "supports", None)
    if supports is None:
        return ""
    key, value = inputs.packed.key.layout, inputs.packed.value.layout
    offered = {**vars(inputs), "key": key, "value": value, "dtype": inputs.query.dtype}
    names = inspect.signature(supports).parameters
    taken = supports(**{name: offered[name] for name in names if name in offered})
    return "" if taken else "the kernel does not support it"


def poison(device: str) -> None:
    """Fill memory that the next call is likely to get with NaN."""
    for power in (8, 12, 16, 18, 20, 24):
        torch.full((2**power,), torch.nan, device=device)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few and small cases")
    parser.add_argument("--purposes", default=",".join(PURPOSES))
    jobs = max(1, min(14, (os.cpu_count() or 1) - 2))
    parser.add_argument("--jobs", type=int, default=jobs, help="processes; most are compiling")
    parser.add_argument("--verbose", action="store_true", help="every case")
    parser.add_argument("--definition", action="store_true", help="check the definition instead")
    args = parser.parse_args()
    if not (args.definition or torch.cuda.is_available()):
        sys.exit("the kernel needs an NVIDIA GPU; --definition checks the definition anywhere")
    start = time.monotonic()
    if args.quick:
        results = run(list(quick()), args.definition)
    else:
        cases = [case for name in args.purposes.split(",") for case in PURPOSES[name]()]
        results = run_side_by_side(cases, args.jobs, args.definition)
    print(report(results, args.verbose))
    print(f"{len(results)} cases in {time.monotonic() - start:.0f} s")
    return int(any(result.failed for result in results))


def run_side_by_side(cases: Sequence[Case], jobs: int, definition: bool) -> list[Result]:
    """Run cases in several processes, those of one compiled program in the same."""
    programs: dict[object, list[Case]] = {}
    for case in cases:
        programs.setdefault(case.program, []).append(case)
    if jobs == 1:
        return run([case for part in programs.values() for case in part], definition)
    parts = [
        part[start : start + TOGETHER]
        for part in programs.values()
        for start in range(0, len(part), TOGETHER)
    ]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawn) as processes:
        done = processes.map(run, parts, itertools.repeat(definition))
        return list(itertools.chain.from_iterable(done))


def report(results: Sequence[Result], verbose: bool) -> str:
    """One line for each purpose, and one for each case that failed or was refused."""
    lines = []
    purposes = dict.fromkeys(result.case.purpose for result in results)
    for purpose in purposes:
        group = [result for result in results if result.case.purpose == purpose]
        ran = [result for result in group if not result.refused]
        failed = [result for result in ran if result.failed]
        worst = max(ran, key=lambda result: result.row, default=None)
        lines.append(f"{purpose}: {len(ran)} cases, {len(failed)} failed")
        if worst is not None:
            head, beyond = (max(getattr(r, name) for r in ran) for name in ("head", "beyond"))
            lines[-1] += f"; worst request {worst.row:.1e}, worst head {head:.1e}, "
            lines[-1] += f"beyond rounding {beyond:.1e} ({worst.case})"
        for result in ran if verbose else failed:
            moves = "" if result.repeats else ", and the second run differs"
            word = "FAILED" if result.failed else "ok"
            lines.append(
                f"  {word}: {result.row:.1e}, head {result.head:.1e}{moves}: {result.case}"
            )
        refused = [result for result in group if result.refused]
        lines += [f"  not supported: {result.case}: {result.refused}" for result in refused]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
