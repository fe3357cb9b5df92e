"""An installed vLLM, in process: with rotations, in bfloat16, and with vLLM's own fp8 cache
("On a GPU" in docs/vllm.md).

    python scripts/bench/serve_engine.py MODEL ROTATIONS [--arms bf16,fp8,segments,vllm]
        [--prompts 8192,32768,100000] [--prefix 64000] [--many 8x8192,8x32000] [--fill 30000]
        [--beside 64000] [--jobs 64x30000+512,256x2048+2048] [--chats 16] [--period 100]

Run it with the Python that has vLLM, on one GPU. Each arm is a process of its own, on the same
card, with the same random prompts, chunks of 8,192 tokens, prefix caching and captured decoding
steps. It prints one table, of medians of three where work can be repeated:

* what the cache holds;
* the first token of a prompt, and a step after it;
* the first token of 200 tokens more after a cached prefix, and of many such requests at once;
* a step of as many requests as fit, at most `--requests`, and the first token of each once more;
* how long a decoding request waits for a token while a prompt is read beside it;
* whole jobs: prompts and all their answers, and chats of ten turns after a shared prefix.

An arm `segments:2.75+3` stores the format `segments` with a budget of 2.75 bits, and verifies three
drafts a step: of n-grams with a `--period`, after which prompts repeat themselves, and else
made up, so that nearly all are rejected. A number of 0, or an empty list, leaves its part out. The
model may have random weights. Times of a first prompt and of jobs are measured once: the second
time they are cached. Each arm compiles its kernels before.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

NEW = 200  # tokens of a follow-up, and of an answer in a chat
SHARED, ASKED, TURNS = 8000, 1000, 10  # tokens of a chat: before all, and in each of its turns
STEPS = 64
"""A request takes so many; the second half is measured, when all requests decode."""


def draft_always(_: Any, drafts: int, sampled: list[list[int]], *__: Any, **___: Any) -> Any:
    return [[5] * drafts * bool(tokens) for tokens in sampled]  # where a request has a token


class Engine:
    """One arm's engine, and random prompts."""

    def __init__(self, arm: str, args: argparse.Namespace):
        import torch
        from vllm import LLM

        arm, _, drafts = arm.partition("+")
        arm, _, bits = arm.partition(":")
        options: dict[str, Any] = {"fp8": {"kv_cache_dtype": "fp8"}}.get(arm, {})
        if arm in ("sglang", "vllm", "segments"):
            config: dict[str, Any] = {"artifact": args.artifact, "format": arm}
            config |= {"bits": float(bits)} if bits else {}
            options = {"additional_config": {"rotationzoo": config}, "attention_backend": "CUSTOM"}
        if drafts and not args.period:
            from vllm.v1.spec_decode.ngram_proposer import NgramProposer

            NgramProposer.propose = draft_always
        if drafts:
            ngrams = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 1}
            options["speculative_config"] = ngrams | {"num_speculative_tokens": int(drafts)}
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
        self.words, self.chunk = config.model_config.get_vocab_size(), args.chunk
        self.draw, self.period = torch.Generator().manual_seed(0), args.period
        self.torch = torch

    def prompt(self, tokens: int) -> list[int]:
        """A prompt that no request had before."""
        drawn: list[int] = self.torch.randint(
            5, self.words, (self.period or tokens,), generator=self.draw
        ).tolist()
        return (drawn * (tokens // len(drawn) + 1))[:tokens]

    def answer(self, prompts: list[list[int]], tokens: int = 1) -> float:
        """Seconds until all prompts have answers of so many tokens, which are added to them."""
        begun = time.perf_counter()
        asked: Any = [{"prompt_token_ids": [*ids]} for ids in prompts]
        answers = self.llm.generate(asked, self.sampling(tokens), use_tqdm=False)
        taken = time.perf_counter() - begun
        for ids, answer in zip(prompts, answers, strict=True):
            ids += answer.outputs[0].token_ids
        return taken

    def sampling(self, tokens: int) -> Any:
        """The most likely tokens, so many."""
        from vllm import SamplingParams

        return SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0, detokenize=False)

    def steps(self, prompts: list[list[int]], begun: int, tokens: int) -> list[float]:
        """Seconds of each step until all prompts are answered. All but the first `begun` prompts
        come when these have answered half."""
        engine, times = self.llm.llm_engine, []
        for number, ids in enumerate(prompts[:begun]):
            engine.add_request(str(number), {"prompt_token_ids": ids}, self.sampling(tokens))
        while engine.has_unfinished_requests():
            if len(times) == tokens // 2:
                for number, ids in enumerate(prompts[begun:], begun):
                    engine.add_request(str(number), {"prompt_token_ids": ids}, self.sampling(1))
            since = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - since)
        return times

    def step(self, prompts: list[list[int]]) -> float:
        """Median seconds of a decoding step after these prompts."""
        return median(self.steps(prompts, len(prompts), STEPS)[-STEPS // 2 : -2])

    def wait(self, tokens: int) -> tuple[float, float]:
        """The median and the most seconds for which a decoding request waits for a token, while a
        prompt of so many tokens is read beside it."""
        chunks = -(-tokens // self.chunk)
        prompts = [self.prompt(self.chunk), self.prompt(tokens)]
        times = self.steps(prompts, 1, STEPS)[STEPS // 2 :][: chunks + 1]
        return median(times), max(times)

    def chat(self, chats: int) -> float:
        """Seconds of so many chats at the same time, turn by turn."""
        shared, taken = self.prompt(SHARED), 0.0
        history = [[*shared] for _ in range(chats)]
        for _ in range(TURNS):
            for ids in history:
                ids += self.prompt(ASKED)
            taken += self.answer(history, NEW)
        return taken


def measure(engine: Engine, args: argparse.Namespace) -> Iterator[tuple[str, float]]:
    """What each row of the table says of an arm, in tokens or milliseconds."""
    yield "tokens that fit", engine.capacity
    for _ in range(2):  # compiles
        engine.answer([engine.prompt(2 * args.chunk + 100)], 4)

    def more(prompts: list[list[int]]) -> float:
        times = [engine.answer([ids + engine.prompt(NEW) for ids in prompts]) for _ in range(9)]
        return median(times[2:])  # the first ones find no memory of their sizes

    def timed(work: Callable[[], float]) -> float:
        return 1e3 * work()

    for tokens in args.prompts:
        one = [engine.prompt(tokens)]
        yield f"first token of {tokens:,}", timed(lambda one=one: engine.answer(one))
        yield f"a step after {tokens:,}", timed(lambda one=one: engine.step(one))
    if args.prefix:
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
    if args.beside:
        middle, longest = engine.wait(args.beside)
        yield f"a step beside a prompt of {args.beside:,}", 1e3 * middle
        yield "the longest of these", 1e3 * longest
    for count, tokens, new in args.jobs:
        several = [engine.prompt(tokens) for _ in range(count)]
        work = partial(engine.answer, several, new)
        yield f"{count} x ({tokens:,} + {new:,})", timed(work)
    if args.chats:
        name = f"{args.chats} chats of {TURNS} x ({ASKED:,} + {NEW}) after {SHARED:,}"
        yield name, timed(lambda: engine.chat(args.chats))


def shapes(text: str) -> list[tuple[int, ...]]:
    """`16x8000+200`: requests, tokens of each, and new ones."""
    return [tuple(map(int, re.split("[x+]", each))) for each in text.split(",") if each]


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",") if each]


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("model", help="folder or hub id")
    parser.add_argument("artifact")
    parser.add_argument("--arms", default="bf16,fp8,segments", help="bf16, fp8, or a format")
    parser.add_argument("--prompts", type=numbers, default=[8192, 32_768, 100_000])
    parser.add_argument("--prefix", type=int, default=64_000)
    parser.add_argument("--many", type=shapes, default=[(8, 8192), (8, 32_000)])
    parser.add_argument("--fill", type=int, default=30_000, help="tokens of each; 0: leave it out")
    parser.add_argument("--beside", type=int, default=64_000, help="tokens of a prompt")
    parser.add_argument("--jobs", type=shapes, default=[])
    parser.add_argument("--chats", type=int, default=16)
    parser.add_argument("--period", type=int, default=0, help="tokens; 0: nothing is repeated")
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
        print(arm, *lines, sep="\n", flush=True)
        measured.append([json.loads(line) for line in lines])
    print(f"| | {' | '.join(arms)} |\n|---|{'---|' * len(arms)}")
    for row in zip(*measured, strict=True):
        values = (f"{value:,.0f}" if value > 1000 else f"{value:.4g}" for _, value in row)
        print(f"| {row[0][0]} | {' | '.join(values)} |")


if __name__ == "__main__":
    main()
