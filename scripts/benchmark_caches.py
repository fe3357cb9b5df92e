"""Real caches beside each other in one run: transformers' own, exact and quantized, and this
project's, with and without rotations.

    python scripts/benchmark_caches.py [MODEL ...] --output FOLDER [--outliers SEED]
        [--recipe NAME] ... [--artifact FOLDER] ... [--libraries "hqq-2;..."] [--contexts N,N]

MODEL is `demo` unless it is given. With `--outliers`, each is followed by a copy with channel
outliers (`add_outliers`). Recipes (`feedback` and `oscar`) are calibrated for every model on the
bundled text; artifacts are measured on the models that they fit. hqq and optimum-quanto must be
installed for transformers' quantized caches.

* **Answers** to the recall tasks: all caches answer the same questions in prompts of 2,048 tokens.
  The text before the first question is read in one call. `DynamicCache` and `RotatedCache` then
  read `--step` tokens a call, as the next turns of a conversation are read: the exact window
  before each call, and the call itself exact. Caches of transformers are read so that it gives
  what token by token gives, each row alone.
* **Perplexity** of held-out text, rows of 2,048 tokens read the same way: the first 320 tokens in
  one call, whose losses do not count.
* **Bits** per element that one request really holds, with scales, zeros, exact tokens and the
  unused part of blocks: the mean while a model decodes up to the first of `--contexts`, because a
  residual fills up and is emptied. transformers keeps up to 128 tokens exact, at the end, and none
  at the start; `residual 320` keeps up to as many as the windows 64/256 of `RotatedCache`.
* **Tokens per second** of greedy decoding, one request, up to each context: the model's forward
  pass, on the device that the table names. quanto's own extension for GPUs, which takes minutes to
  compile, is replaced by torch operations.

Prints tables, and writes FOLDER/caches.md and MODEL.caches.json, which `compare_answers` reads.
"""

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import torch
from add_outliers import write_copy
from benchmark_answers import (
    TEXTS,
    Questions,
    Record,
    Run,
    ask,
    read_exact,
    text_losses,
    write_questions,
)
from cache_contenders import (
    RESIDUALS,
    WINDOWS,
    Contender,
    exact_cache,
    library_cache,
    measure_decoding,
    rotated_cache,
)
from cache_readers import Reader
from compare_answers import EXACT, Measured, read
from loading import DEVICE, Loaded, load

from rotationzoo import calibrate
from rotationzoo.artifact.store import Artifact
from rotationzoo.recipe import Data
from rotationzoo.text.documents import HELD_OUT

SETTING = "2048"
LIBRARIES = ("hqq-2", "hqq-4", "quanto-2", "quanto-4")
FORMATS = ("sglang", "vllm", "kivi")
SMALLEST = "vllm"
"""The format that is tried with every size of the exact windows."""
PLAIN = "no rotation"
Make = Callable[[], Contender]


def main() -> int:
    options = parse_arguments()
    options.output.mkdir(parents=True, exist_ok=True)
    data = Data(source=options.data, tokens=TEXTS, length=2048)
    pages: list[str] = []
    decoding: Record = {}
    for model, name, is_copy in models(options):
        # A copy with outliers has the shapes of its model, and so its bytes and its speed.
        decoding = decoding if is_copy else {}
        run = Run(options, model, load(model, getattr(torch, options.dtype), data))
        report = measure_model(run, name, decoding)
        title = f"{name}, {options.dtype}, {device_name()}"
        pages.append("\n".join(table(title, report, options.contexts)))
        print(pages[-1], flush=True)
        (options.output / "caches.md").write_text("\n\n".join(pages) + "\n", encoding="utf-8")
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", default=["demo"])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--outliers", type=int, metavar="SEED", help="also measure a copy")
    parser.add_argument("--recipe", action="append", help="feedback and oscar, unless given")
    parser.add_argument("--artifact", action="append", type=Path, default=[])
    parser.add_argument("--libraries", type=split, default=[*LIBRARIES])
    parser.add_argument("--formats", type=split, default=[*FORMATS])
    parser.add_argument(
        "--contexts", type=lambda text: [*map(int, text.split(","))], default=[2048]
    )
    parser.add_argument("--questions", type=int, default=64, help="per task")
    parser.add_argument("--texts", type=int, default=6, help="rows for the perplexity")
    parser.add_argument("--step", type=int, default=16, help="tokens a call after the first")
    parser.add_argument("--reading", default="auto", help="of RotatedCache: rows, pages or auto")
    parser.add_argument("--batch", type=int, default=16, help="rows a call")
    parser.add_argument("--dtype", default="bfloat16", help="of the model: bfloat16 or float32")
    parser.add_argument("--data", default=str(HELD_OUT), help="text to judge on")
    parser.add_argument("--tokens", type=int, help="of calibration")
    parser.add_argument("--shorten", type=int, default=1, help="divide prompts, to try it out")
    options = parser.parse_args()
    if options.recipe is None:
        options.recipe = [] if options.artifact else ["feedback", "oscar"]
    options.fewer = options.questions
    return options


def split(text: str) -> list[str]:
    return [part for part in re.split("[;,]", text) if part]


def models(options: argparse.Namespace) -> Iterator[tuple[str, str, bool]]:
    """Each model with a name for files and tables, then its copy with outliers; and whether it is a
    copy."""
    for model in options.models:
        name = re.sub(r"[^\w-]+", "-", Path(model).name)
        yield model, name, False
        if options.outliers is not None:
            copy = options.output / f"{name}-o{options.outliers}"
            if not (copy / "config.json").exists() and write_copy(model, copy, options.outliers):
                raise SystemExit(f"{model} cannot be given outliers without changing its logits")
            yield str(copy), copy.name, True


def measure_model(run: Run, name: str, decoding: Record) -> Record:
    """Everything about one model. `decoding` collects what depends on shapes alone."""
    questions = write_questions(run, SETTING)
    report = read_exact(run, questions)
    path = run.options.output / f"{name}.caches.json"
    content = {"model": name, "device": device_name(), "settings": {SETTING: report}}
    for title, make in contenders(run, name):
        # One cache that fails should not cost the others.
        try:
            contender = make()
            record = measure(run, contender, questions, report, decoding)
        except Exception as error:
            print(f"{name}, {title} failed: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        report["arms"][contender.name] = record
        path.write_text(json.dumps(content) + "\n", encoding="utf-8")
        print(f"{name}, {contender.name}: {record['seconds']} s", file=sys.stderr, flush=True)
    return report


def contenders(run: Run, name: str) -> Iterator[tuple[str, Make]]:
    """All caches of a model, with names for errors. None exists before it is its turn."""
    options, model = run.options, run.loaded.model
    yield "DynamicCache", lambda: exact_cache(model, options.step)
    for library, residual in product(options.libraries, RESIDUALS):
        # Where four bits are compared, exact tokens matter little.
        if residual == RESIDUALS[0] or "-2" in library:
            yield library, lambda of=library, size=residual: library_cache(model, of, size)
    for title, artifact in rotations(run, name):
        for format, (sink, recent) in product(options.formats, WINDOWS):
            if (sink, recent) != WINDOWS[0] and format != SMALLEST:
                continue
            windows = {"format": format, "sink": sink, "recent": recent}
            windows["reading"] = options.reading
            yield (
                f"{title}, {format}",
                lambda t=title, a=artifact, w=windows: rotated_cache(
                    model, t, a, options.step, **w
                ),
            )


def rotations(run: Run, name: str) -> Iterator[tuple[str, Artifact | None]]:
    """The artifacts of a model: those that are calibrated now, and those that were given."""
    options = run.options
    for recipe in options.recipe:
        folder = options.output / "artifacts" / f"{name}-{recipe}"
        text = {"tokens": options.tokens} if options.tokens else {}
        started = time.monotonic()
        artifact = calibrate(run.model, output=folder, recipe=recipe, **text)
        print(
            f"{name}, {recipe}: calibrated in {time.monotonic() - started:.1f} s", file=sys.stderr
        )
        yield recipe, artifact
    for folder in options.artifact:
        yield folder.resolve().name, Artifact.open(folder)
    yield PLAIN, None


@torch.no_grad()
def measure(
    run: Run, contender: Contender, questions: Questions, report: Record, decoding: Record
) -> Record:
    """The answers, the losses, the bits and the speed of one cache."""
    started = time.monotonic()
    reader = Reader(contender.reader, torch.no_grad, 0)
    tasks = ask(reader, questions, report, None)
    losses = text_losses(reader, questions, len(questions.texts))
    if contender.name not in decoding:
        decoding[contender.name] = decode(run.loaded, contender, run.options.contexts)
    speeds = decoding[contender.name]
    return {
        "bits": speeds[0]["bits"],
        "tasks": tasks,
        "text_losses": losses,
        "decoding": speeds,
        "seconds": round(time.monotonic() - started, 1),
    }


def decode(loaded: Loaded, contender: Contender, contexts: list[int]) -> list[Record]:
    """What a request holds and how fast it decodes, up to each context."""
    ids = torch.cat([*loaded.text.rows])[None].to(DEVICE)
    return [
        measure_decoding(loaded.model, loaded.geometry, contender, ids[:, :context])
        for context in contexts
    ]


def table(title: str, report: Record, contexts: list[int]) -> list[str]:
    """A model's caches as Markdown, and this project's beside those that hold at least as much."""
    measured = read(title, report)
    speeds = [f"tokens/s at {context:,}" for context in contexts]
    head = ["cache", "bits", "smaller", "answers", "nats", "perplexity", *speeds]
    lines = [f"## {title}", "", row(head), "|---" * len(head) + "|"]
    lines.append(row([EXACT, "16", "1", *quality(measured, EXACT), *[""] * len(speeds)]))
    for arm, record in report["arms"].items():
        bits = record["bits"]
        speed = [f"{each['tokens_per_second']:.0f}" for each in record["decoding"]]
        lines.append(row([arm, f"{bits:.2f}", f"{16 / bits:.2f}", *quality(measured, arm), *speed]))
    return [*lines, "", *comparisons(measured)]


def quality(measured: Measured, arm: str) -> list[str]:
    """Answers in %, nats an answer, and perplexity beside the exact one."""
    replies = measured.arms[arm].replies.values()
    asked = max(1, sum(reply.questions for reply in replies))
    answered = sum(reply.answered for reply in replies)
    nats = sum(reply.log_probability for reply in replies)
    losses = measured.arms[arm].text_losses
    perplexity = math.exp(sum(losses) / len(losses))
    increase = measured.perplexity_increase(arm)
    shown = f"{perplexity:.3f} ({increase:+.1%})"
    return [f"{100 * answered / asked:.1f} % of {asked}", f"{nats / asked:.2f}", shown]


def comparisons(measured: Measured) -> list[str]:
    """How much more each cache of this project answers than a quantized one of transformers that
    holds as many bits or more: the best of those within 25 %, standard errors over prompts."""
    lines = []
    libraries = [arm for arm in measured.arms if arm.startswith(("hqq", "quanto"))]
    others = [arm for arm in measured.arms if arm not in (*libraries, EXACT, "DynamicCache")]
    for library, other in product(libraries, others):
        bits, mine = (measured.arms[arm].bits for arm in (library, other))
        if 0.75 * bits <= mine <= bits:
            share, error = measured.difference(other, library, "share")
            nats, spread = measured.difference(other, library, "nats")
            lines.append(
                f"* {other} ({mine:.2f} bits) beside {library} ({bits:.2f}): "
                f"{100 * share:+.1f} ± {100 * error:.1f} % answers, {nats:+.2f} ± {spread:.2f} nats"
            )
    return lines


def row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def device_name() -> str:
    return torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"


if __name__ == "__main__":
    sys.exit(main())
