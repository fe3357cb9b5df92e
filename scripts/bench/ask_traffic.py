"""Random traffic in a real vLLM, after which each request is asked again alone ("Traffic" in
docs/vllm.md).

    python scripts/bench/ask_traffic.py --model MODEL --rotations ROTATIONS
        [--arms bf16,vllm+priority,...] [--minutes 5 | --requests 500] [--seed 0]

Run it with the Python that has vLLM; its CPU engine gets smaller sizes. Each arm is an engine in
a separate process. An arm names the cache: `bf16` (vLLM's own), `vllm` or `segments` (our formats),
optionally with `+priority`.

Traffic comes in rounds, drawn from the seed: bursts with shared prefixes, two to four samples of a
prompt, follow-ups and aborts, in chunks of a random size, with many blocks or so few that requests
preempt each other. After a round, every request is asked again, alone and in the same state
(`traffic_alone.py` says how). The distance of two answers is that of the log probabilities of the
first token of each stay, on average over the 20 likeliest tokens.

The limit is the distance that correct runs may have: all requests, and so the prefixes that they
share, are asked once more next to a stranger, in the same state, and the limit is twice the largest
of these distances, or `FLOOR`. The last line is JSON with the failures, the largest distances and
the averages, and the exit code is 1 if several arms have any failure.
"""

import argparse
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
from measuring import DEVICE, make_parser, run_arms, start_engine
from traffic_alone import Alone, Likeliest, Stay, Watch, sampling

FLOOR = {"float32": 0.003, "float16": 0.004, "bfloat16": 0.03}
"""Nats by which correct answers may differ."""
SIZES = {
    "prefix": 20_000, "own": 4000, "answer": 40, "chunks": [512, 1024, 2048, 4096, 8192],
    "active": 16, "seqs": 256, "longest": 65_536, "stranger": 700,
}  # fmt: skip
SMALL = {
    "prefix": 600, "own": 100, "answer": 12, "chunks": [64, 128, 256],
    "active": 8, "seqs": 64, "longest": 2048, "stranger": 60,
}  # fmt: skip
"""Sizes for the CPU engine. Tokens of a prefix, of a request after it and of an answer, at most;
requests at a time, at most, and slots for copies of so many; room in a step for the stranger."""


@dataclass
class Question:
    """A request of the traffic."""

    prompt: list[int]
    samples: int
    answers: dict[int, Any] = field(default_factory=dict)  # vLLM's request of each sample
    names: list[str] = field(default_factory=list)  # of the samples, in the engine
    done: bool = False


def start(arm: str, args: argparse.Namespace) -> Any:
    """The engine of an arm."""
    stored, _, more = arm.partition("+")
    options: dict[str, Any] = {"scheduling_policy": more} if more else {}
    if DEVICE == "cpu":
        options["enforce_eager"] = True
    else:
        options["compilation_config"] = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32]}
        options["gpu_memory_utilization"] = 0.6
    if args.cache is not None:
        memory = {"gpu_memory_utilization": 0.05}
        options |= memory | {"kv_cache_memory_bytes": int(args.cache * 2**30)}
    return start_engine(
        args.model,
        stored,
        args.rotations,
        dtype=args.dtype,
        max_model_len=args.longest,
        max_num_seqs=args.seqs,
        max_num_batched_tokens=max(args.chunks) + args.stranger,
        enable_prefix_caching=True,
        seed=0,
        **options,
    )


class Traffic:
    """A round of an arm's requests."""

    def __init__(self, watch: Watch, arm: str, number: int, args: argparse.Namespace):
        self.watch, self.args, self.engine = watch, args, watch.engine
        self.draw = random.Random(f"{args.seed} {arm} {number}")
        self.words = self.engine.vllm_config.model_config.get_vocab_size()
        self.priorities = "priority" in arm
        self.name = f"{arm} seed {args.seed} round {number}"
        self.questions: dict[str, Question] = {}
        self.prefixes: list[list[int]] = []
        watch.begin()
        draw, size = self.draw, watch.size
        # Steps of prompts alone differ from those in which others decode.
        self.calm = number % 2 == 0
        self.chunk = draw.choice(args.chunks[-3:] if self.calm else args.chunks)
        self.threshold = draw.choice([0, 0, self.chunk // 2])
        self.prefix = int(args.prefix / draw.choice([1, 1, 2]))
        self.longest = min(args.longest - 8, 2 * self.prefix + 6 * args.own)
        self.active = draw.randint(3, args.active)
        self.blocks, self.answer = watch.pool.get_num_free_blocks(), args.answer
        if not self.calm or draw.random() < 0.3:  # requests preempt each other
            self.answer, self.active = 3 * args.answer, args.active
            self.longest = self.prefix + 2 * args.own + self.answer
            self.blocks = min(self.blocks, int(self.longest / size * draw.uniform(1, 1.5)) + 2)

    def run(self) -> None:
        """Ask and answer all requests."""
        watch, scheduler = self.watch, self.watch.scheduler
        scheduler.max_num_scheduled_tokens = self.chunk
        scheduler.scheduler_config.long_prefill_token_threshold = self.threshold
        held = watch.pool.get_new_blocks(watch.pool.get_num_free_blocks() - self.blocks)
        while self.asked < self.args.round or self.engine.has_unfinished_requests():
            while self.asked < self.args.round and self.running < self.active:
                if self.running and (self.calm or self.draw.random() < 0.5):
                    break
                self.ask_some()
            live = [name for name, each in self.questions.items() if not each.done]
            if live and self.draw.random() < 0.008:
                name = self.draw.choice(live)
                self.engine.abort_request([name])
                self.questions[name].done = True
            for output in self.engine.step():
                question = self.questions[output.request_id]
                question.answers.update((each.index, each) for each in output.outputs)
                question.done = output.finished
        watch.pool.free_blocks(held)
        watch.close_all()

    @property
    def asked(self) -> int:
        return sum(each.samples for each in self.questions.values())

    @property
    def running(self) -> int:
        return sum(each.samples for each in self.questions.values() if not each.done)

    def random_tokens(self, count: int) -> list[int]:
        return [self.draw.randrange(5, self.words) for _ in range(count)]

    def some(self, most: int) -> int:
        """A number up to this one, of any magnitude."""
        return min(most, int(2 ** self.draw.uniform(0, most.bit_length())))

    def ask_some(self) -> None:
        """A burst of requests."""
        draw, own = self.draw, self.args.own
        kind = draw.choice(["burst", "burst", "samples", "follow-up", "same", "alone"])
        ended = [each for each in self.questions.values() if each.done and each.answers]
        if kind == "follow-up" and ended:
            for _ in range(draw.randint(1, 3)):
                before = draw.choice(ended)
                answer = draw.choice([*before.answers.values()])
                self.add([*before.prompt, *answer.token_ids, *self.random_tokens(self.some(own))])
            return
        prefix = self.draw_prefix()
        if kind in ("samples", "same"):
            prompt = prefix + self.random_tokens(self.some(own))
            samples = draw.randint(2, 4)
            if kind == "samples":
                self.add(prompt, samples)
            for _ in range(samples if kind == "same" else 0):
                self.add(prompt)
            return
        for _ in range(draw.randint(2, 6) if kind == "burst" else 1):
            self.add(prefix + self.random_tokens(self.some(own)))

    def draw_prefix(self) -> list[int]:
        """One of this round's, which may go on from another."""
        draw = self.draw
        if len(self.prefixes) < 2 or draw.random() < 0.3:
            base = draw.choice(self.prefixes) if self.prefixes and draw.random() < 0.5 else []
            long = draw.random() < 0.5
            tokens = draw.randint(self.prefix // 2, self.prefix) if long else self.some(self.prefix)
            most = self.longest - self.args.own - self.answer
            self.prefixes.append((base + self.random_tokens(tokens))[:most])
        return draw.choice([*self.prefixes, self.prefixes[-1], []])

    def add(self, prompt: list[int], samples: int = 1) -> None:
        """Add a request to the engine, unless it is too long."""
        draw, answer = self.draw, self.draw.randint(1, self.answer)
        if not prompt or len(prompt) + answer > self.longest:
            return
        warm = samples > 1 or draw.random() < 0.3
        asked = sampling(answer, logprobs=20, temperature=float(warm), n=samples)
        name = f"q{len(self.questions)}"
        given = {"priority": draw.randrange(4)} if self.priorities else {}
        inner = self.engine.add_request(name, {"prompt_token_ids": prompt}, asked, **given)
        names = [inner] if samples == 1 else [f"{index}_{inner}" for index in range(samples)]
        self.questions[name] = Question(prompt, samples, names=names)


class Comparison:
    """The distances between an arm's traffic and its requests alone."""

    def __init__(self, watch: Watch, args: argparse.Namespace):
        self.watch, self.args = watch, args
        self.counts: Counter[str] = Counter()
        self.beside: list[float] = []
        self.stays: list[tuple[float, str]] = []

    def add(self, traffic: Traffic) -> None:
        """Ask each request of a round again."""
        watch, counts, told, names, answers = self.watch, self.counts, {}, {}, {}
        for name, question in traffic.questions.items():
            counts["requests"] += question.samples
            for index, inner in enumerate(question.names):
                answers[inner] = question, index, f"{traffic.name}, {name} sample {index}"
        for stay in watch.stays:
            question, index, names[stay] = answers[stay.request.request_id]
            counts["in the same step"] += stay.met > 0
            told[stay] = read_likeliest(stay, question, index)
        counts["preempted"] += len(told) - len({stay.request.request_id for stay in told})
        alone = self._ask(Alone(watch), told)
        for stay, seen in alone.items():
            where = f"{names[stay]}: {stay.given} tokens, {stay.cached} cached, {stay.met} of the"
            where += f" same step, chunks up to {stay.ends[:40]}"
            self.stays.append((measure(seen, told[stay][1]), where))
        counts.update(f"not compared: {stay.unknown}" for stay in told if stay.unknown)
        for stay, seen in self._ask(Alone(watch, traffic.draw), told).items():
            if stay in alone:
                self.beside.append(measure(seen, alone[stay]))

    def _ask(self, alone: Alone, told: dict[Stay, Likeliest | None]) -> dict[Stay, torch.Tensor]:
        """The log probabilities of what each stay was told, when all are asked again."""
        watch, found = self.watch, {}
        watch.begin()
        for stay, each in told.items():
            if any(wrote.unknown for wrote, _ in stay.shared):
                stay.unknown = stay.unknown or "it found blocks of such requests"
            if watch.pool.get_num_free_blocks() < 3 * len(stay.tokens) // watch.size + 8:
                stay.unknown = stay.unknown or "no memory is left"
            seen = None if stay.unknown else alone.ask(stay, each and each[0])
            if seen is not None and each and not stay.unknown:
                found[stay] = seen
        alone.release()
        return found

    def result(self, dtype: str) -> dict[str, Any]:
        """All numbers and failures."""
        limit = max(FLOOR[dtype], 2 * max(self.beside, default=0.0))
        off = [f"{distance:.4f}: {where}" for distance, where in self.stays if distance > limit]
        result = {**self.counts, "off": off, "limit": limit}
        each = [distance for distance, _ in self.stays]
        for name, distances in (("compared", each), ("beside strangers", self.beside)):
            numbers = len(distances), max(distances, default=0.0), fmean(distances or [0.0])
            result |= dict(
                zip((name, f"largest, {name}", f"average, {name}"), numbers, strict=True)
            )
        return result


def measure(one: torch.Tensor, other: torch.Tensor) -> float:
    """How far log probabilities `[R, N]` or `[N]` are apart. Of several rows, the nearest is the
    stay's."""
    return float((one - other).abs().mean(-1).min())


def read_likeliest(stay: Stay, question: Question, index: int) -> Likeliest | None:
    """The likeliest tokens of the first one that a stay answered, if it answered."""
    answer, place = question.answers.get(index), stay.given - len(question.prompt)
    if answer is None or place >= len(answer.logprobs) or stay.given >= len(stay.tokens):
        return None
    chances = answer.logprobs[place]
    ranked = {token: each.logprob for token, each in chances.items() if each.rank <= 20}
    return torch.tensor([*ranked]), torch.tensor([*ranked.values()])


def run_arm(arm: str, args: argparse.Namespace) -> dict[str, Any]:
    """The result of an arm, after so many minutes and requests."""
    watch = Watch(start(arm, args))
    comparison, ready, rounds = Comparison(watch, args), time.perf_counter(), 0
    while (
        comparison.counts["requests"] < max(1, args.requests)
        or time.perf_counter() - ready < 60 * args.minutes
    ):
        traffic = Traffic(watch, arm, rounds, args)
        traffic.run()
        comparison.add(traffic)
        rounds += 1
    return comparison.result(args.dtype)


def main() -> None:
    parser = make_parser(__doc__)
    parser.set_defaults(**(SIZES if DEVICE == "cuda" else SMALL))
    parser.add_argument("--model", required=True)
    parser.add_argument("--rotations", help="with transform coding, for segments")
    parser.add_argument("--arms", default="bf16,vllm+priority")
    parser.add_argument("--minutes", type=float, default=0, help="of each arm, without its start")
    parser.add_argument("--requests", type=int, default=0, help="of each arm, at least")
    parser.add_argument("--round", type=int, default=32, help="requests of a round")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16", choices=FLOOR)
    parser.add_argument("--prefix", type=int, help="tokens, at most")
    parser.add_argument("--answer", type=int, help="tokens, at most")
    parser.add_argument("--chunks", type=int, nargs="+", help="tokens of a step, one is drawn")
    parser.add_argument("--cache", type=float, help="GiB of it, for engines that share a GPU")
    args = parser.parse_args()
    if "," not in args.arms:
        print(json.dumps(run_arm(args.arms, args)), flush=True)
        return
    measured = dict(run_arms(args.arms.split(",")))
    sys.exit(any(result["off"] for result in measured.values()))


if __name__ == "__main__":
    main()
