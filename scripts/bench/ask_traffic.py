"""Random traffic in a real vLLM, and each of its requests again alone ("Traffic" in
docs/vllm.md).

    python scripts/bench/ask_traffic.py --model MODEL --rotations ROTATIONS
        [--arms bf16,segments,...] [--minutes 10 | --requests 500] [--seed 0] [--small]

Run it with the Python that has vLLM. Each arm is an engine in a process of its own. An arm is what
is stored, `bf16` (vLLM's own cache), `vllm` or `segments` (our formats), and any of `+priority`,
`+drafts`, `+offload` (to main memory) and `+slots`, with slots for exact copies of so few requests
that they are taken from each other.

Traffic comes in rounds, drawn from the seed: bursts with shared prefixes, two to four samples of a
prompt, follow-ups, aborts, in chunks of a drawn size, with many blocks or so few that requests
preempt each other. After a round, every request is asked again, alone and in the same state
(`traffic_alone.py` says how). The distance of two answers is that of log probabilities, on average
over the 20 likeliest tokens; of a request, the first token of each stay counts, and the worst
of the others apart.

The limit is what two right runs differ by: some requests are asked once more beside a stranger, in
the same state, and the limit is `--times` the largest of these distances, at least `--floor`.
What is off is printed. The last line is JSON, and the exit code is 1 where anything is off.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

ARMS = "bf16,segments,vllm+priority,segments+drafts+priority,segments+offload,segments+slots"


Places = dict[int, Any]
"""For each place of a request, a tensor `[R, N]` of log probabilities, or `[N]`."""
Told = dict[int, tuple[Any, Any]]
"""For each place, tokens `[N]` and their log probabilities `[N]`."""


@dataclass
class Question:
    """A request of the traffic."""

    prompt: list[int]
    samples: int
    answers: dict[int, Any] = field(default_factory=dict)
    """vLLM's of each sample, as far as they are there."""
    names: list[str] = field(default_factory=list)
    """Of the samples, in the engine."""
    aborted: bool = False
    done: bool = False


def sampling(tokens: int, chances: int | None, **others: Any) -> Any:
    """So many tokens, whatever they are."""
    from vllm import SamplingParams

    fixed = {"ignore_eos": True, "detokenize": False, "logprobs": chances}
    return SamplingParams(max_tokens=tokens, **{"temperature": 0} | fixed | others)


def start(arm: str, args: argparse.Namespace) -> Any:
    """The engine of an arm."""
    from vllm import LLM

    stored, *more = arm.split("+")
    options: dict[str, Any] = {}
    if stored != "bf16":
        config = {"artifact": args.rotations, "format": stored}
        options["additional_config"] = {"rotationzoo": config}
        if not args.small:
            options["attention_backend"] = "CUSTOM"
    if "priority" in more:
        options["scheduling_policy"] = "priority"
    if "drafts" in more:
        ngrams = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}
        options["speculative_config"] = ngrams | {"num_speculative_tokens": 3}
    if "offload" in more:
        options["kv_offloading_size"] = args.offload
    if args.small:
        options["enforce_eager"] = True
    else:
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        options["compilation_config"] = graphs | {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32]}
        options["gpu_memory_utilization"] = args.memory
        if args.cache is not None:
            memory = {"gpu_memory_utilization": 0.05}
            options |= memory | {"kv_cache_memory_bytes": int(args.cache * 2**30)}
    return LLM(
        args.model,
        dtype=args.dtype,
        skip_tokenizer_init=True,
        max_model_len=args.longest,
        max_num_seqs=args.active if "slots" in more else args.seqs,
        max_num_batched_tokens=max(args.chunks) + args.stranger,
        enable_prefix_caching=True,
        disable_log_stats=True,
        seed=0,
        **options,
    )


class Traffic:
    """A round of an arm's requests."""

    def __init__(self, watch: Any, arm: str, number: int, args: argparse.Namespace):
        self.watch, self.args, self.engine = watch, args, watch.engine
        self.draw = random.Random(f"{args.seed} {arm} {number}")
        self.words = self.engine.vllm_config.model_config.get_vocab_size()
        self.priorities, self.drafts = "priority" in arm, "drafts" in arm
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
        """Ask all, and answer all."""
        watch, scheduler = self.watch, self.watch.scheduler
        scheduler.max_num_scheduled_tokens = self.chunk
        scheduler.scheduler_config.long_prefill_token_threshold = self.threshold
        held = watch.pool.get_new_blocks(watch.pool.get_num_free_blocks() - self.blocks)
        idle = 0
        while self.asked < self.args.round or self.engine.has_unfinished_requests():
            while self.asked < self.args.round and self.running < self.active:
                if self.running and (self.calm or self.draw.random() < 0.5):
                    break
                self.ask_some()
            live = [name for name, each in self.questions.items() if not each.done]
            if live and self.draw.random() < 0.008:
                name = self.draw.choice(live)
                self.engine.abort_request([name])
                self.questions[name].aborted = self.questions[name].done = True
            stays = len(watch.stays)
            outputs = self.engine.step()
            for output in outputs:
                question = self.questions[output.request_id]
                question.answers.update((each.index, each) for each in output.outputs)
                question.done = output.finished
            idle = 0 if outputs or len(watch.stays) > stays else idle + 1
            if idle > 2000:
                raise RuntimeError(f"{self.name}: vLLM answers nobody")
        watch.pool.free_blocks(held)
        watch.close_all()

    @property
    def asked(self) -> int:
        return sum(each.samples for each in self.questions.values())

    @property
    def running(self) -> int:
        return sum(each.samples for each in self.questions.values() if not each.done)

    def random_tokens(self, count: int) -> list[int]:
        """Drawn ones; for drafts, with repetitions."""
        period = self.draw.randint(8, 64) if self.drafts else count
        drawn = [self.draw.randrange(5, self.words) for _ in range(min(period, count))]
        return (drawn * (count // max(1, len(drawn)) + 1))[:count]

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
        """Hand a request to the engine, unless it is too long."""
        draw, answer = self.draw, self.draw.randint(1, self.answer)
        if not prompt or len(prompt) + answer > self.longest:
            return
        warm = samples > 1 or draw.random() < 0.3
        options: dict[str, Any] = {"temperature": float(warm), "n": samples}
        if self.drafts:
            options["allowed_token_ids"] = sorted({*prompt[-6:]})
        name = f"q{len(self.questions)}"
        given = {"priority": draw.randrange(4)} if self.priorities else {}
        asked = sampling(answer, 20, **options)
        inner = self.engine.add_request(name, {"prompt_token_ids": prompt}, asked, **given)
        names = [inner] if samples == 1 else [f"{index}_{inner}" for index in range(samples)]
        self.questions[name] = Question(prompt, samples, names=names)


@dataclass
class Apart:
    """How far log probabilities are apart, each on average over the likeliest tokens."""

    first: float
    """Of a stay's first token."""
    others: list[float]
    """Of each of its other tokens."""
    where: str = ""

    @classmethod
    def measure(cls, one: Places, other: Places, first: int, where: str = "") -> "Apart":
        """Of those in the same places. Where there are several rows, the nearest is the stay's."""
        values = {place: float((one[place] - other[place]).abs().mean(-1).min()) for place in other}
        return cls(values.pop(first, 0.0), [*values.values()], where)


class Comparison:
    """What an arm's traffic and its requests alone differ by."""

    def __init__(self, watch: Any, args: argparse.Namespace):
        self.watch, self.args = watch, args
        self.counts: Counter[str] = Counter()
        self.beside: list[Apart] = []
        self.stays: list[Apart] = []

    def add(self, traffic: Traffic) -> None:
        """Ask each request of a round again."""
        from traffic_alone import Alone

        watch, counts, draw = self.watch, self.counts, traffic.draw
        stays, answers = watch.stays, {}
        for name, question in traffic.questions.items():
            counts["requests"] += question.samples
            counts["aborted"] += question.aborted * question.samples
            counts["samples"] += question.samples * (question.samples > 1)
            for index, inner in enumerate(question.names):
                answers[inner] = question, index, f"{traffic.name}, {name} sample {index}"
        counts["preempted"] += len(stays) - len({stay.request.request_id for stay in stays})
        watch.begin()
        alone = Alone(watch, sampling)
        for stay in stays:
            question, index, name = answers[stay.request.request_id]
            counts["cached"] += stay.cached > 0
            counts["in the same step"] += stay.met > 0
            counts["loaded"] += stay.loaded > 0
            beside = self.args.stranger * (draw.random() < self.args.controls)
            told = read_chances(stay, question, index)
            self._ask(alone, stay, told, traffic.random_tokens(beside), name)
            if stay.unknown:
                counts[f"not compared: {stay.unknown}"] += 1
        counts["rounds in which slots ran out"] += not watch.slots_left()
        alone.release()

    def _ask(self, alone: Any, stay: Any, told: Told, stranger: list[int], name: str) -> None:
        """Ask a stay again, and once more beside a stranger, if there is one."""
        if any(wrote.unknown for wrote, _ in stay.shared):
            stay.unknown = stay.unknown or "it found blocks of such requests"
        if self.watch.pool.get_num_free_blocks() < 3 * len(stay.tokens) // self.watch.size + 8:
            stay.unknown = stay.unknown or "no memory is left"
        if stay.unknown:
            return
        wanted = {place: tokens for place, (tokens, _) in told.items()}
        seen = alone.ask(stay, wanted)
        if stay.unknown or not seen:
            return
        where = f"{name}: {stay.given} tokens, {stay.cached} cached, {stay.met} of the same step"
        where += f", {stay.loaded} loaded, chunks up to {stay.ends[:40]}"
        values = {place: told[place][1] for place in seen}
        self.stays.append(Apart.measure(seen, values, stay.given, where))
        if stranger:
            beside = alone.ask(stay, wanted, stranger)
            self.beside.append(Apart.measure(beside, seen, stay.given))

    def result(self) -> dict[str, Any]:
        """All numbers; what is off is printed."""
        limit, limit_of_others = (
            max(self.args.floor, self.args.times * max(values, default=0.0))
            for values in (first_of(self.beside), means_of(self.beside))
        )
        off = [
            each
            for each in self.stays
            if each.first > limit or mean(each.others or [0.0]) > limit_of_others
        ]
        for each in off[:20]:
            others = ", ".join(f"{value:.4f}" for value in each.others)
            print(f"off by {each.first:.4f}, then {others}: {each.where}", flush=True)
        return {
            **self.counts,
            "compared": len(self.stays),
            "off": len({each.where.split(":")[0] for each in off}),
            "largest": max(first_of(self.stays), default=0.0),
            "limits": [limit, limit_of_others],
            "first": spread(first_of(self.stays)),
            "first beside": spread(first_of(self.beside)),
            "others": spread(means_of(self.stays)),
            "others beside": spread(means_of(self.beside)),
        }


def first_of(several: list[Apart]) -> list[float]:
    return [each.first for each in several]


def means_of(several: list[Apart]) -> list[float]:
    return [mean(each.others) for each in several if each.others]


def read_chances(stay: Any, question: Question, index: int) -> Told:
    """The likeliest tokens and their log probabilities in each place that a stay answered."""
    import torch

    answer, told = question.answers.get(index), {}
    for place, chances in enumerate(answer.logprobs if answer else [], len(question.prompt)):
        if stay.given <= place < len(stay.tokens):
            ranked = {token: each.logprob for token, each in chances.items() if each.rank <= 20}
            told[place] = torch.tensor([*ranked]), torch.tensor([*ranked.values()])
    return told


def run_arm(arm: str, args: argparse.Namespace) -> dict[str, Any]:
    """What an arm found, after so many minutes and requests."""
    from traffic_alone import Watch

    begun = time.perf_counter()
    watch = Watch(start(arm, args))
    comparison, ready, rounds, asking = Comparison(watch, args), time.perf_counter(), 0, 0.0
    while (
        comparison.counts["requests"] < max(1, args.requests)
        or time.perf_counter() - ready < 60 * args.minutes
    ):
        since = time.perf_counter()
        traffic = Traffic(watch, arm, rounds, args)
        traffic.run()
        asking += time.perf_counter() - since
        comparison.add(traffic)
        rounds += 1
        largest = max(first_of(comparison.stays), default=0.0)  # of a run that is stopped, too
        print(f"{rounds} rounds, {len(comparison.stays)} compared: {largest:.4f}", flush=True)
    times = ready - begun, asking, time.perf_counter() - ready - asking
    seconds = dict(zip(("start", "traffic", "alone"), map(round, times), strict=True))
    return {**comparison.result(), "rounds": rounds, "seconds": seconds}


def spread(values: list[float]) -> list[float]:
    """How many there are, their median, and the largest of 90 %, 99 % and all."""
    ranked = sorted(values)
    at = [ranked[int(part * (len(ranked) - 1))] for part in (0.5, 0.9, 0.99, 1) if ranked]
    return [len(ranked), *(round(value, 5) for value in at)]


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rotations", help="with transform coding, for segments")
    parser.add_argument("--arms", default=ARMS)
    parser.add_argument(
        "--minutes", type=float, default=0, help="of all arms, without their starts"
    )
    parser.add_argument("--requests", type=int, default=0, help="of each arm, at least")
    parser.add_argument("--round", type=int, default=32, help="requests of a round")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--small", action="store_true", help="sizes for the CPU engine")
    parser.add_argument("--prefix", type=int, help="tokens, at most")
    parser.add_argument("--own", type=int, help="tokens of a request after its prefix, at most")
    parser.add_argument("--answer", type=int, help="tokens, at most")
    parser.add_argument("--chunks", type=numbers)
    parser.add_argument("--active", type=int, help="requests at a time, at most")
    parser.add_argument("--seqs", type=int, help="--max-num-seqs: slots for so many requests")
    parser.add_argument("--longest", type=int, help="--max-model-len")
    parser.add_argument("--stranger", type=int, help="tokens of the request beside")
    parser.add_argument("--memory", type=float, default=0.6, help="--gpu-memory-utilization")
    parser.add_argument("--cache", type=float, help="GiB of it, for engines that share a GPU")
    parser.add_argument("--offload", type=float, default=8, help="GB, --kv-offloading-size")
    parser.add_argument("--controls", type=float, default=0.2, help="part of requests asked beside")
    parser.add_argument("--times", type=float, default=2)
    parser.add_argument("--floor", type=float, help="of the limit; default: .003, in 16 bits .03")
    args = parser.parse_args()
    large = {
        "prefix": 20_000, "own": 4000, "answer": 40, "chunks": [512, 1024, 2048, 4096, 8192],
        "active": 16, "seqs": 256, "longest": 65_536, "stranger": 700,
    }  # fmt: skip
    small = {
        "prefix": 600, "own": 100, "answer": 12, "chunks": [64, 128, 256],
        "active": 8, "seqs": 64, "longest": 2048, "stranger": 60,
    }  # fmt: skip
    for name, value in (small if args.small else large).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.floor is None:
        args.floor = 0.003 if args.dtype == "float32" else 0.03
    arms = args.arms.split(",")
    if len(arms) == 1:
        result = run_arm(arms[0], args)
        print(json.dumps(result), flush=True)
        sys.exit(bool(result["off"]))
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    measured, failed = {}, []
    for arm in arms:
        part = ["--arms", arm, "--minutes", str(args.minutes / len(arms))]
        command = [sys.executable, *sys.argv, *part]
        done = subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE)
        lines = [line for line in done.stdout.splitlines() if line.startswith(("off by", '{"'))]
        print(arm, *lines, sep="\n", flush=True)
        if not lines or lines[-1][0] != "{":
            failed.append(arm)
            continue
        measured[arm] = json.loads(lines[-1])
    names = "requests", "compared", "off"
    total = {name: sum(each[name] for each in measured.values()) for name in names}
    total["largest"] = max((each["largest"] for each in measured.values()), default=0.0)
    print(json.dumps({**total, "failed": failed, "arms": measured}), flush=True)
    sys.exit(bool(total["off"] or failed))


if __name__ == "__main__":
    main()
