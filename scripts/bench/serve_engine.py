"""An installed vLLM, in process: with rotations, in bfloat16, and with vLLM's own fp8 cache
("On a GPU" in docs/vllm.md).

    python scripts/bench/serve_engine.py MODEL ROTATIONS [--arms bf16,fp8,segments,vllm]
        [--shapes 1x8192,1x100000,8x8192,8x32000] [--steps 64]

Run it with the Python that has vLLM, on one GPU. Each arm is a separate process on the same GPU,
with the same random prompts, chunks of 8,192 tokens, prefix caching and captured decode steps. It
prints one table: the capacity of the cache, and for each shape, which gives the number of requests
(`fill`: as many as fit) and the tokens of each,

* the time to first token of all requests, once, because prompts are cached the second time;
* a decode step of all: the median of the second half of the steps, when all requests decode;
* the time to first token with 200 more tokens after each cached prompt: the median of seven; or,
  with `fill`, the tokens per second of these steps.

An arm `segments:2.75+3` stores the format `segments` with a budget of 2.75 bits, and verifies three
random drafts per step, so that nearly all are rejected. The model may have random weights. Each arm
compiles its kernels first.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
from measuring import make_parser, run_arms, start_engine

NEW = 200  # tokens after a cached prompt


def draft_always(_: Any, drafts: int, sampled: list[list[int]], *__: Any, **___: Any) -> Any:
    return [[5] * drafts * bool(tokens) for tokens in sampled]  # where a request has a token


class Engine:
    """One arm's engine, and random prompts."""

    def __init__(self, arm: str, args: argparse.Namespace):
        stored, _, drafts = arm.partition("+")
        options: dict[str, Any] = {}
        if drafts:
            from vllm.v1.spec_decode.ngram_proposer import NgramProposer

            NgramProposer.propose = draft_always
            ngrams = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 1}
            options["speculative_config"] = ngrams | {"num_speculative_tokens": int(drafts)}
        self.llm = start_engine(
            args.model,
            stored,
            args.artifact,
            dtype="bfloat16",
            max_model_len=args.longest,
            max_num_seqs=args.requests,
            max_num_batched_tokens=args.chunk,
            gpu_memory_utilization=args.memory,
            **options,
        )
        config = self.llm.llm_engine.vllm_config
        self.capacity = config.cache_config.num_gpu_blocks * config.cache_config.block_size
        self.words = config.model_config.get_vocab_size()
        self.draw = torch.Generator().manual_seed(0)

    def prompts(self, count: int, tokens: int) -> list[list[int]]:
        """Prompts that no request had before."""
        drawn: list[list[int]] = torch.randint(
            5, self.words, (count, tokens), generator=self.draw
        ).tolist()
        return drawn

    def answer(self, prompts: list[list[int]], tokens: int = 1) -> list[float]:
        """The seconds of each step until all prompts have answers of so many tokens."""
        from vllm import SamplingParams

        engine, times = self.llm.llm_engine, []
        likeliest = {"ignore_eos": True, "temperature": 0, "detokenize": False}
        since = time.perf_counter()
        for number, ids in enumerate(prompts):
            asked = SamplingParams(max_tokens=tokens, **likeliest)
            engine.add_request(str(number), {"prompt_token_ids": ids}, asked)
        while engine.has_unfinished_requests():
            engine.step()
            now = time.perf_counter()
            times.append(now - since)
            since = now
        return times


def measure(engine: Engine, args: argparse.Namespace) -> Iterator[tuple[str, float]]:
    """The rows of the table for an arm, in tokens or milliseconds."""
    yield "tokens that fit", engine.capacity
    for _ in range(2):  # compiles
        engine.answer(engine.prompts(1, 2 * args.chunk + 100), 4)
    for count, tokens in args.shapes:
        fit = min(args.requests, engine.capacity // (tokens + args.steps + 64))
        prompts, shape = engine.prompts(count or fit, tokens), f"{count or 'fill'} x {tokens:,}"
        yield f"first tokens of {shape}", 1e3 * sum(engine.answer(prompts))
        steps = engine.answer(prompts, args.steps)
        yield f"a step of {shape}", 1e3 * (step := median(steps[-args.steps // 2 : -2]))
        if not count:
            yield f"tokens per second of {shape}", fit / step
            continue
        times = []
        for _ in range(9):
            added = zip(prompts, engine.prompts(count, NEW), strict=True)
            times.append(sum(engine.answer([ids + new for ids, new in added])))
        # The first ones find no memory of their sizes.
        yield f"first tokens of {NEW} more after {shape}", 1e3 * median(times[2:])


def read_shapes(text: str) -> list[list[int]]:
    """`8x32000`: requests, and tokens of each; 0 is `fill`."""
    text = text.replace("fill", "0")
    return [[int(number) for number in each.split("x")] for each in text.split(",")]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("model", help="folder or hub id")
    parser.add_argument("artifact")
    parser.add_argument("--arms", default="bf16,fp8,segments", help="bf16, fp8, or a format")
    shapes = "1x8192,1x100000,8x8192,8x32000"
    parser.add_argument("--shapes", type=read_shapes, default=shapes)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--longest", type=int, default=104_448, help="--max-model-len")
    parser.add_argument("--requests", type=int, default=64, help="--max-num-seqs")
    parser.add_argument("--memory", type=float, default=0.9, help="--gpu-memory-utilization")
    parser.add_argument("--chunk", type=int, default=8192, help="--max-num-batched-tokens")
    args = parser.parse_args()
    if "," not in args.arms:
        rows = []
        for row in measure(Engine(args.arms, args), args):
            rows.append(row)
            print(*row, file=sys.stderr, flush=True)  # a later one may fail
        print(json.dumps(rows), flush=True)
        return
    measured = dict(run_arms(args.arms.split(",")))
    print(f"| | {' | '.join(measured)} |\n|---|{'---|' * len(measured)}")
    for row in zip(*measured.values(), strict=True):
        values = (f"{value:,.0f}" if value > 1000 else f"{value:.4g}" for _, value in row)
        print(f"| {row[0][0]} | {' | '.join(values)} |")


if __name__ == "__main__":
    main()
