"""An installed vLLM, in process: with rotations, in bfloat16, and with vLLM's own fp8 cache.

    python scripts/bench/serve_engine.py MODEL ROTATIONS [--arms bf16,fp8,feedback,nearest]
        [--prompts 8192,32768,100000] [--prefix 64000] [--many 8x8192,8x32000] [--fill 30000]

Run it with the Python that has vLLM, on one GPU. Each arm is a process of its own, on the same
card, with the same random prompts, chunks of 8,192 tokens, prefix caching and captured decoding
steps. It prints one table, of medians of three where work can be repeated:

* what the cache holds;
* the first token of a prompt, and a step after it;
* the first token of 200 tokens more after a cached prefix, and of many such requests at once;
* a step of as many requests as fit, at most 64, and the first token of each once more.

The model may have random weights. Times of a first prompt are measured once: the second time it is
cached. Each arm compiles its kernels before.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

NEW = 200  # tokens of a follow-up
STEPS = 64
"""A request takes so many; the second half is measured, when all requests decode."""


class Engine:
    """One arm's engine, and random prompts."""

    def __init__(self, arm: str, args: argparse.Namespace):
        import torch
        from vllm import LLM

        options: dict[str, Any] = {"fp8": {"kv_cache_dtype": "fp8"}}.get(arm, {})
        if arm in ("feedback", "nearest"):
            config = {"artifact": args.artifact, "rounding": arm}
            options = {"additional_config": {"rotationzoo": config}, "attention_backend": "CUSTOM"}
        self.llm = LLM(
            args.model,
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=args.longest,
            max_num_seqs=args.requests,
            max_num_batched_tokens=args.chunk,
            gpu_memory_utilization=0.9,
            compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
            disable_log_stats=True,
            **options,
        )
        config = self.llm.llm_engine.vllm_config
        self.capacity = config.cache_config.num_gpu_blocks * config.cache_config.block_size
        self.words = config.model_config.get_vocab_size()
        self.draw = torch.Generator().manual_seed(0)
        self.torch = torch

    def prompt(self, tokens: int) -> list[int]:
        """A prompt that no request had before."""
        drawn: list[int] = self.torch.randint(
            5, self.words, (tokens,), generator=self.draw
        ).tolist()
        return drawn

    def answer(self, prompts: list[list[int]], tokens: int = 1) -> float:
        """Seconds until all prompts have answers of so many tokens."""
        begun = time.perf_counter()
        asked: Any = [{"prompt_token_ids": ids} for ids in prompts]
        self.llm.generate(asked, self.sampling(tokens), use_tqdm=False)
        return time.perf_counter() - begun

    def sampling(self, tokens: int) -> Any:
        """The most likely tokens, so many."""
        from vllm import SamplingParams

        return SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0, detokenize=False)

    def step(self, prompts: list[list[int]]) -> float:
        """Median seconds of a decoding step after these prompts."""
        engine, times = self.llm.llm_engine, []
        for number, ids in enumerate(prompts):
            asked: Any = {"prompt_token_ids": ids}
            engine.add_request(str(number), asked, self.sampling(STEPS))
        while engine.has_unfinished_requests():
            begun = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - begun)
        return median(times[-STEPS // 2 : -2])


def measure(engine: Engine, args: argparse.Namespace) -> Iterator[tuple[str, float]]:
    """What each row of the table says of an arm, in tokens or milliseconds."""
    yield "tokens that fit", engine.capacity
    for _ in range(2):  # compiles
        engine.answer([engine.prompt(2 * args.chunk + 100)], 4)

    def more(prompts: list[list[int]]) -> float:
        times = [engine.answer([ids + engine.prompt(NEW) for ids in prompts]) for _ in range(7)]
        return median(times[2:])  # the first ones find no memory of their sizes

    def timed(work: Callable[[], float]) -> float:
        return 1e3 * work()

    for tokens in args.prompts:
        one = [engine.prompt(tokens)]
        yield f"first token of {tokens:,}", timed(lambda one=one: engine.answer(one))
        yield f"a step after {tokens:,}", timed(lambda one=one: engine.step(one))
    one = [engine.prompt(args.prefix)]
    engine.answer(one)
    yield f"first token of {NEW} more after {args.prefix:,}", timed(lambda: more(one))
    for count, tokens in args.many:
        several = [engine.prompt(tokens) for _ in range(count)]
        yield f"first tokens of {count} x {tokens:,}", timed(lambda s=several: engine.answer(s))
        yield f"a step of {count} x {tokens:,}", timed(lambda s=several: engine.step(s))
        yield f"first tokens of {count} x {NEW} more", timed(lambda s=several: more(s))
    if args.fill:
        fits = min(args.requests, engine.capacity // (args.fill + STEPS))
        several = [engine.prompt(args.fill) for _ in range(fits)]
        engine.answer(several)
        yield f"requests of {args.fill:,}", fits
        yield "first tokens of all, cached", timed(lambda: engine.answer(several))
        yield "a step of all", timed(lambda: engine.step(several))


def shapes(text: str) -> list[tuple[int, int]]:
    """`16x8000`: requests, and tokens of each."""
    pairs = (each.split("x") for each in text.split(","))
    return [(int(count), int(tokens)) for count, tokens in pairs]


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("model", help="folder or hub id")
    parser.add_argument("artifact")
    parser.add_argument("--arms", default="bf16,fp8,feedback", help="bf16, fp8, feedback, nearest")
    parser.add_argument("--prompts", type=numbers, default=[8192, 32_768, 100_000])
    parser.add_argument("--prefix", type=int, default=64_000)
    parser.add_argument("--many", type=shapes, default=[(8, 8192), (8, 32_000)])
    parser.add_argument("--fill", type=int, default=30_000, help="tokens of each; 0: leave it out")
    parser.add_argument("--longest", type=int, default=104_448, help="--max-model-len")
    parser.add_argument("--requests", type=int, default=64, help="--max-num-seqs")
    parser.add_argument("--chunk", type=int, default=8192, help="--max-num-batched-tokens")
    args = parser.parse_args()
    if "," not in args.arms:
        for name, value in measure(Engine(args.arms, args), args):
            print(json.dumps([name, value]), flush=True)
        return
    # In this process, so that it is known when the engine's work has ended.
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    arms, measured = args.arms.split(","), []
    for arm in arms:
        command = [sys.executable, *sys.argv, "--arms", arm]
        done = subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE)
        lines = [line for line in done.stdout.splitlines() if line.startswith('["')]
        if done.returncode:
            sys.exit(f"the arm {arm} ended with {done.returncode}")
        measured.append([json.loads(line) for line in lines])
    print(f"| | {' | '.join(arms)} |\n|---|{'---|' * len(arms)}")
    for row in zip(*measured, strict=True):
        values = (f"{value:,.0f}" if value > 1000 else f"{value:.4g}" for _, value in row)
        print(f"| {row[0][0]} | {' | '.join(values)} |")


if __name__ == "__main__":
    main()
