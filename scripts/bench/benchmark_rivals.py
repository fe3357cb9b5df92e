"""What a user may pick instead of a rotation: answers and losses through the caches of other
methods and engines, beside artifacts, on the same prompts.

    python scripts/bench/benchmark_rivals.py MODEL [ROTATIONS...] [--arms NAME,NAME]
        [--tasks needles,key-value] [--prompts 16] [--length 2048] [--texts 16] [--data FILE]
        [--output FILE]

Arms, all on by default; those whose packages are missing are reported and left out:

* the artifacts, `identity`, `hadamard` and `random`, as in `evaluate`;
* `kivi-32`, `kivi-64`: keys per channel over so many tokens, values per token over so many
  channels; and both with the first artifact's rotations;
* transformers' own caches (`transformers_caches`): `hqq-2`, `quanto-4` and others, really read;
* other engines' caches (`simulation.rivals`): `q4_0`, `fp8`, `turboquant_3bit_nc` and
  others, simulated in all layers. They keep no token exact but those of an incomplete tile of
  KVarN, and nothing of them is calibrated. vLLM itself leaves the first two and the last two layers
  of a dense model out of TurboQuant.

The first two kinds keep sink and recent tokens exact, and transformers' caches as many tokens at
the end.

A column tells the bits per element at the length of the prompts with exact tokens counted, so that
arms can be compared at equal bytes. At D = 64, `--format vllm` takes as many as `kivi-64` and the
2-bit caches of transformers, and `--format sglang` as many as `kivi-32`. The other columns:

* `answers`: questions whose whole answer is the most probable one, of all tasks and of each;
* `log p`: mean log probability of an answer in nats;
* `loss`: nats per token of the last tokens of plain text, as many as are kept exact;
* beside the first arm: questions that only this arm, and that only the first one answered, with the
  p value of the sign-flip test over prompts.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cache_readers import (
    Reader,
    answers_of,
    exact,
    list_kivi,
    losses_of,
    rival_of,
    simulated,
    through,
)
from loading import Loaded, load
from measuring import DEVICE, describe_error, make_parser
from transformers_caches import CACHES

from rotationzoo.artifact.store import Artifact
from rotationzoo.codec.formats import SIMULATED
from rotationzoo.codec.layout import CacheLayout
from rotationzoo.evaluation.arms import Arm, build_arms
from rotationzoo.evaluation.verdict import sign_flip
from rotationzoo.model import loading
from rotationzoo.model.source import find
from rotationzoo.recall.exercises import TASKS
from rotationzoo.recall.prompts import Prompt, PromptSettings, write_prompts
from rotationzoo.recipe import Data
from rotationzoo.simulation.rivals import ENGINE_CACHES, RivalCodec
from rotationzoo.text.documents import HELD_OUT

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Questions:
    """What every arm is asked."""

    prompts: dict[str, list[Prompt]]
    """Task -> prompts."""
    texts: list[torch.Tensor]
    """Batches `[B, T]` of plain text."""
    kept: int
    """How many tokens at the end of a text have their loss measured."""
    batch: int


def main() -> int:
    options = parse_arguments()
    cache = CacheLayout(SIMULATED[options.format], *map(int, options.windows.split("/")))
    source = options.data or str(HELD_OUT)
    rows = options.texts + 2 * options.prompts
    data = Data(source=source, tokens=rows * options.length, length=options.length)
    loaded = load(options.model, TYPES[options.dtype], data)
    questions = ask(loaded, cache, options)
    results: dict[str, dict[str, Any]] = {}
    artifacts = [Artifact.open(folder) for folder in options.artifacts]
    arms = build_arms(artifacts, loaded.geometry)
    for name, create in list_readers(loaded, arms, cache, options.length).items():
        if options.arms and name != "exact" and name not in options.arms.split(","):
            continue
        started = time.monotonic()
        try:
            results[name] = measure(create(), questions)
        except Exception as error:  # a library that does not run here must not stop the others
            print(f"{name} failed: {describe_error(error)}", file=sys.stderr)
            continue
        print(f"{name}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
        if options.output:  # after each arm, because some take minutes
            options.output.write_text(json.dumps(results) + "\n", encoding="utf-8")
    show(options, questions, results)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("model")
    parser.add_argument("artifacts", type=Path, nargs="*")
    parser.add_argument("--arms", help="only these, by name; exact is always there")
    parser.add_argument("--tasks", default="needles,key-value")
    parser.add_argument("--prompts", type=int, default=16, help="of each task")
    parser.add_argument("--texts", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--windows", default="64/256", help="sink and recent tokens kept exact")
    parser.add_argument("--format", default="sglang", choices=SIMULATED)
    parser.add_argument("--dtype", default="float32", choices=TYPES)
    parser.add_argument("--data", help="text around the statements; the bundled held-out text")
    parser.add_argument("--output", type=Path, help="a JSON file for the answers of every arm")
    return parser.parse_args()


def ask(loaded: Loaded, cache: CacheLayout, options: argparse.Namespace) -> Questions:
    """Prompts of every task, and plain texts, from different rows of the data."""
    rows = loaded.text.rows
    tokenizer = loading.load_tokenizer(find(options.model))
    filler = torch.cat(rows[options.texts :] or rows).tolist()
    prompts = {}
    for task in options.tasks.split(","):
        settings = PromptSettings(
            task,
            options.prompts,
            options.length,
            first=cache.sink,
            # `kivi-64` keeps up to 63 more tokens exact.
            recent=cache.recent + 64,
            seed=options.seed,
        )
        prompts[task] = write_prompts(settings, tokenizer, filler)
    texts = torch.stack(rows[: options.texts]).to(DEVICE).split(options.batch)
    return Questions(prompts, list(texts), cache.sink + cache.recent, options.batch)


def list_readers(
    loaded: Loaded, arms: list[Arm], cache: CacheLayout, length: int
) -> dict[str, Callable[[], Reader]]:
    """Name -> what makes the arm's reader, for the arms of `evaluate` and for all others."""
    simulated_arms = [arm for arm in arms if arm.name != "kivi"] + list_kivi()
    readers: dict[str, Callable[[], Reader]] = {"exact": partial(exact, loaded)}
    for arm in simulated_arms:
        readers[arm.name] = partial(simulated, loaded, arm, cache, length)
    readers |= {name: partial(through, loaded, name, cache, length) for name in CACHES}
    none = CacheLayout(sink=0, recent=0)
    for name in ENGINE_CACHES:
        arm = rival_of(name, RivalCodec.of_engine(name))
        readers[name] = partial(simulated, loaded, arm, none, length)
    return readers


@torch.no_grad()
def measure(reader: Reader, questions: Questions) -> dict[str, Any]:
    """An arm's answers to every question, by task, and its loss on plain text."""
    tasks = {}
    with reader.context():
        for task, prompts in questions.prompts.items():
            answers = answers_of(reader.model, prompts, questions.batch)
            correct, log_probability = answers.correct, answers.log_probability
            tasks[task] = {
                "correct": correct.tolist(),
                "log_probability": log_probability.tolist(),
            }
        losses = []
        for ids in questions.texts:
            losses.append(losses_of(reader.model, ids, ids.shape[1] - questions.kept))
        loss = torch.cat(losses).double().mean(1).cpu().tolist() if losses else []
    return {"bits": reader.bits, "tasks": tasks, "text_losses": loss}


def show(
    options: argparse.Namespace, questions: Questions, results: dict[str, dict[str, Any]]
) -> None:
    """Print one row per arm."""
    asked = sum(len(prompt.questions) for rows in questions.prompts.values() for prompt in rows)
    print(
        f"{Path(options.model).name}, {asked} questions in prompts of {options.length} tokens, "
        f"windows {options.windows}, format {options.format}, {options.dtype}, {DEVICE}"
    )
    first = next(name for name in results if name != "exact")
    width = max(map(len, results))
    columns = "".join(f"{task:>13s}" for task in questions.prompts)
    print(f"{'arm':{width}s} {'bits':>6s} {'answers':>8s} {'log p':>8s}{columns} {'loss':>8s}")
    for name, result in results.items():
        correct, log_probability = together(result)
        by_task = ""
        for task in result["tasks"].values():
            by_task += f"{torch.tensor(task['correct']).double().mean():13.1%}"
        loss = torch.tensor(result["text_losses"]).mean()
        line = f"{name:{width}s} {result['bits']:6.2f} {correct.double().mean():8.1%} "
        line += f"{log_probability.mean():8.3f}{by_task} {loss:8.4f}"
        if name not in ("exact", first):
            other, _ = together(results[first])
            gained, lost = int((correct & ~other).sum()), int((other & ~correct).sum())
            p = sign_flip(gains_by_prompt(result, results[first]))
            line += f"  beside {first}: +{gained} -{lost}, p {p:.2g}"
        print(line)


def gains_by_prompt(result: dict[str, Any], other: dict[str, Any]) -> list[int]:
    """How many more questions of each prompt an arm answers than another."""
    gains = []
    for name, task in result["tasks"].items():
        pairs = zip(task["correct"], other["tasks"][name]["correct"], strict=True)
        differences = torch.tensor([one - two for one, two in pairs])
        gains += [int(each.sum()) for each in differences.split(TASKS[name])]
    return gains


def together(result: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether each question of all tasks was answered, and its log probability."""
    tasks = result["tasks"].values()
    correct = torch.tensor([value for task in tasks for value in task["correct"]])
    log_probability = [value for task in tasks for value in task["log_probability"]]
    return correct, torch.tensor(log_probability, dtype=torch.float64)


if __name__ == "__main__":
    sys.exit(main())
