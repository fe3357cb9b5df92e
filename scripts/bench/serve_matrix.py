"""Features of a released vLLM, each alone and in pairs, over our pages ("The matrix" in
docs/vllm.md, which this script prints).

    python scripts/bench/serve_matrix.py [--rows budget,quick] [--cells prefix,prefix+ngrams]
        [--jobs 4] [--work FOLDER]

Run it from a clone with the project's Python; engines run with `ROTATIONZOO_VLLM_PYTHON`, or that
of `make vllm`. Models are small and random, except the demo model.

A cell is an engine with these features, which answers rounds of concurrent requests; some of them
share a prefix. Each answer is compared with that of an engine without the features to the same
request alone, whose prompt is cut into the same chunks: log probabilities are compared up to the
first token that differs. A cell is `equal`, `refused` by this project or by vLLM, or `WRONG`.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from datetime import date
from itertools import combinations
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[2] / "tests"))
TOKENS, DRAFTS, CHUNK = 24, 3, 128
CLOSE = {"float32": 1e-3, "float16": 5e-3, "bfloat16": 5e-2}
"""The most nats per token, on average, by which two correct answers differ."""
ITSELF = "vLLM with its own cache, too"
LOUDEST = 1.0
"""If a stranger changes answers by more nats per token, a cell is compared with nothing."""
TIMES = 3
"""This many times the distance between a request alone and next to a stranger, if that is more."""


@dataclass(frozen=True)
class Feature:
    """A column."""

    title: str
    engine: dict[str, Any] = field(default_factory=dict)  # options of vLLM
    family: str = ""  # the model that it is a property of
    counts: bool = False  # whether the same request alone has it too, because it changes numbers
    chunk: int = 3  # chunks of a prompt have so many times `CHUNK` tokens, or those of a block


def draft(method: str, **more: Any) -> dict[str, Any]:
    return {"speculative_config": {"method": method, "num_speculative_tokens": DRAFTS, **more}}


ON_GPU = torch.cuda.is_available()
OF_LATENTS = {"dtype": "float16"} if ON_GPU else {}  # kernels take latents in 16 bits
NGRAMS = draft("ngram", prompt_lookup_max=3, prompt_lookup_min=1)
PAIRED = {
    "prefix": Feature("prefix caching", {"enable_prefix_caching": True}),
    "chunks": Feature("chunked prefill", chunk=1),
    "ngrams": Feature("n-grams", NGRAMS),
    "draft": Feature("draft model", draft("draft_model", model="DEMO")),
    # vLLM computes the last cached block again for these. Only if a chunk ends before it, there are
    # exact copies of what is read there, as in the same request alone.
    "eagle": Feature("EAGLE", draft("eagle", model="HEAD"), chunk=1),
    "mtp": Feature("MTP", draft("mtp"), family="ernie", chunk=1),
    "hybrid": Feature("hybrid (Granite 4)", family="granite_h"),
    "windows": Feature("sliding windows (Gemma 2)", family="windows and soft caps"),
    "latents": Feature("latents (DeepSeek V3)", OF_LATENTS, family="latents", counts=True),
    "float16": Feature("float16", {"dtype": "float16"}, counts=True),
}
ALONE = {
    "falcon": Feature("hybrid (Falcon-H1)", family="falcon_h1"),
    # Its states need 16 bits on a CPU, and flashinfer or this on a GPU.
    "next": Feature(
        "hybrid (Qwen3-Next)",
        {"gdn_prefill_backend": "triton", "dtype": "bfloat16"},
        "qwen3_next",
        counts=True,
    ),
    "gemma3": Feature("sliding windows (Gemma 3)", family="windows and two RoPEs"),
    "gpt-oss": Feature("windows and sinks (gpt-oss)", family="windows and sinks"),
    "async": Feature("`--async-scheduling`", {"async_scheduling": True}),
    "offload": Feature("offloading", {"kv_offloading_size": 1, "enable_prefix_caching": True}),
    # GPU kernels take these only in 16 bits.
    "fp8": Feature("FP8 weights", {"quantization": "fp8", "dtype": "bfloat16"}, counts=True),
    "lora": Feature(
        "LoRA", {"enable_lora": True, "max_lora_rank": 8, "dtype": "bfloat16"}, counts=True
    ),
    "sleep": Feature("sleep mode", {"enable_sleep_mode": True}),
    "two": Feature("two processes", {"tensor_parallel_size": 2}),
}
FEATURES = PAIRED | ALONE


@dataclass(frozen=True)
class Cell:
    """An engine of a row."""

    row: str
    names: tuple[str, ...]

    @property
    def features(self) -> list[Feature]:
        return [FEATURES[name] for name in self.names]

    @property
    def impossible(self) -> str:
        """Why no engine has all of this; empty if one may."""
        families = [each.family for each in self.features if each.family]
        if sum("speculative_config" in each.engine for each in self.features) > 1:
            return "one at a time"
        if len(families) > 1:
            return "no such model here"
        if "eagle" in self.names and families:
            return "no such head here"
        return ""

    @property
    def family(self) -> str:
        return next((each.family for each in self.features if each.family), "demo")

    @property
    def chunk(self) -> int:
        return min((each.chunk for each in self.features), default=3)

    def options(self, alone: bool) -> dict[str, Any]:
        """vLLM's options, without those that the same request alone does not have."""
        options: dict[str, Any] = {"dtype": "float32", "enable_prefix_caching": False}
        for each in self.features:
            if each.counts or not alone:
                options |= each.engine
        return options

    @property
    def close(self) -> float:
        return CLOSE[self.options(True)["dtype"]]


# ---- models and rotations, with the project's Python


def save_models(work: Path, families: set[str]) -> None:
    """The models, an EAGLE head, and an adapter."""
    from support.hybrids import CACHED, save_hybrid
    from support.vllm_models import (
        LARGE_LATENTS,
        save_adapter,
        save_head,
        save_served,
        save_with_mtp,
    )

    for family in sorted(families - {"demo"}):
        if (work / family).exists():
            continue
        if family == "ernie":
            save_with_mtp(work / family)
        elif family in CACHED:
            save_hybrid(family, work / family)
        else:
            sizes = LARGE_LATENTS if ON_GPU and family == "latents" else {}
            save_served(family, work / family, **sizes)
    for name, save in {"head": save_head, "adapter": save_adapter}.items():
        if not (work / name).exists():
            save(work / name)


def calibrate(work: Path, family: str, row: str) -> None:
    """Make the rotations of a model, unless they exist."""
    from rotationzoo.calibration.calibrate import calibrate as run
    from rotationzoo.calibration.plan import Job
    from rotationzoo.recipe import Data
    from rotationzoo.recipe.loading import PRESETS

    if (folder := work / f"{family}-{row}").exists():
        return
    recipe = PRESETS[{"budget": "transform", "quick": "oscar"}[row]]
    recipe = recipe.model_copy(update={"data": Data(tokens=2048, length=512)})
    model = "demo" if family == "demo" else str(work / family)
    run(Job(model, recipe, folder, device="cpu"))


# ---- engines, in processes with vLLM's Python


def make_job(cell: Cell, work: Path, alone: bool, exact: bool = False) -> dict[str, Any]:
    """What a process is asked for; `exact`: of vLLM's own cache."""
    from support.hybrids import CACHED
    from support.vllm import engine_job

    from rotationzoo.model.source import DEMO

    options = cell.options(alone)
    places = {"DEMO": str(DEMO), "HEAD": str(work / "head")}
    if drafts := options.get("speculative_config"):
        options["speculative_config"] = drafts | {
            key: places[value] for key, value in drafts.items() if value in places
        }
    model = str(DEMO) if cell.family == "demo" else str(work / cell.family)
    artifact = None if exact else work / f"{cell.family}-{cell.row}"
    # Blocks of a hybrid, and so its chunks, are larger.
    longest = 8192 if cell.family in CACHED else 2048
    options |= {"model": model, "max_model_len": longest, "max_num_batched_tokens": 8 * longest}
    job = engine_job(artifact, [], TOKENS, **options)
    if options.get("enable_lora"):
        job["adapter"] = str(work / "adapter")
    return {
        "engine": job["engine"],
        "tokens": TOKENS,
        "chunk": cell.chunk,
        "adapter": job.get("adapter"),
    }


def run_worker(jobs: list[dict[str, Any]], work: Path, name: str) -> list[dict[str, Any]]:
    """The answers of the engines of these jobs, one after another. A process ends with an engine
    that fails, which counts if it was the first: later ones may fail because of earlier ones."""
    done: list[dict[str, Any]] = []
    while len(done) < len(jobs):
        answers = run_process(jobs[len(done) :], work, f"{name}-{len(done)}")
        done += answers[:-1] if len(answers) > 1 and "error" in answers[-1] else answers
    return done


def run_process(jobs: list[dict[str, Any]], work: Path, name: str) -> list[dict[str, Any]]:
    """The answers of the engines of these jobs until one fails."""
    from support.vllm import PYTHON, environment

    asked, answered = work / f"{name}.json", work / f"{name}.answers.json"
    asked.write_text(json.dumps(jobs))
    answered.unlink(missing_ok=True)
    command = [PYTHON, __file__, "--worker", asked, answered]
    variables = environment() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    variables["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # this process has asked for a GPU
    with (work / f"{name}.log").open("w") as log:
        subprocess.run(command, env=variables, stdout=log, stderr=log, check=False)
    if not answered.exists():
        return [{"error": f"the process ended: {name}.log"}]
    found: list[dict[str, Any]] = json.loads(answered.read_text())
    return found


def work_off(asked: Path, answered: Path) -> None:
    """Run the jobs of a file with vLLM until one fails, and write each answer, or the error."""
    done: list[dict[str, Any]] = []
    for job in json.loads(asked.read_text()):
        try:
            done.append(answer_job(job))
        except BaseException as error:  # how a server ends, too
            traceback.print_exc()
            done.append({"error": f"{type(error).__name__}: {error}".strip()})
        answered.write_text(json.dumps(done))
        if "error" in done[-1]:  # an engine may leave something behind
            break


def answer_job(job: dict[str, Any]) -> dict[str, Any]:
    """The answers of an engine, which leaves nothing behind."""
    import gc

    answers = run_engine(job)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return {"answers": answers}


def run_engine(job: dict[str, Any]) -> list[dict[str, Any]]:
    """The answers to rounds that are drawn here, or to single requests."""
    from vllm import LLM, SamplingParams

    llm, given = LLM(**job["engine"]), {}
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    unit = max(CHUNK, llm.llm_engine.vllm_config.cache_config.block_size)
    if job["adapter"]:
        from vllm.lora.request import LoRARequest

        given["lora_request"] = LoRARequest("adapter", 1, job["adapter"])
    sampling = SamplingParams(max_tokens=job["tokens"], temperature=0, logprobs=20, ignore_eos=True)

    def ask(prompts: list[list[int]], chunk: int) -> list[dict[str, Any]]:
        requests = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = llm.generate(requests, sampling, use_tqdm=False, **given)
        return [describe(each, chunk) for each in outputs]

    answers = []
    scheduler.scheduler_config.long_prefill_token_threshold = chunk = unit * job["chunk"]
    for prompts in [] if "requests" in job else draw_rounds(unit):
        answers += ask(prompts, chunk)
        if job["engine"].get("enable_sleep_mode"):
            llm.sleep()
            llm.wake_up()
    stranger = draw_rounds(unit)[0][0][::-1]
    for request in job.get("requests", []):
        for beside in ([], [stranger]):
            cut_prompt(scheduler, request["cached"], request["chunk"])
            answers += ask([request["prompt"], *beside], request["chunk"])[:1]
    return answers


def cut_prompt(scheduler: Any, cached: int, chunk: int) -> None:
    """Cut the next prompt as for a request that finds so many tokens in the cache."""
    own, config = type(scheduler).schedule, scheduler.scheduler_config
    first = iter([cached] if cached else [])

    def schedule(*given: Any, **named: Any) -> Any:
        size = next(first, chunk) if scheduler.requests else chunk
        config.long_prefill_token_threshold = size
        # vLLM ignores the threshold if there is only one request.
        scheduler.max_num_scheduled_tokens = size * max(1, len(scheduler.requests))
        return own(scheduler, *given, **named)

    scheduler.schedule = schedule


def draw_rounds(unit: int) -> list[list[list[int]]]:
    """Concurrent requests, whose prompts are three chunks and some tokens: a repetitive one, a
    separate one, three that share a prefix; then some of them again."""
    from transformers import AutoTokenizer

    from rotationzoo.model.source import DEMO
    from rotationzoo.text.documents import HELD_OUT

    lines = HELD_OUT.read_text("utf-8").splitlines()[1:7]
    text = "".join(json.loads(line)["text"] for line in lines)
    ids = AutoTokenizer.from_pretrained(DEMO)(text).input_ids
    ids, shared = (ids * (8 * unit // len(ids) + 1)), 3 * unit
    repeated = (ids[:90] * (shared // 90 + 1))[: shared + 50]
    own = ids[700 : 700 + shared + 41]
    prefix = ids[200 : 200 + shared]
    family = [prefix + ids[at : at + 56] for at in (1500, 1600, 1700)]
    return [[repeated, own, *family], [family[1], own, repeated]]


def describe(output: Any, chunk: int) -> dict[str, Any]:
    (answer,) = output.outputs
    chances = [{token: each.logprob for token, each in its.items()} for its in answer.logprobs]
    return {
        "prompt": [*output.prompt_token_ids],
        "answer": [*answer.token_ids],
        "chances": chances,
        "cached": output.num_cached_tokens or 0,
        "chunk": chunk,
    }


# ---- differences


def distance(found: dict[str, Any], alone: dict[str, Any]) -> float:
    """The mean nats per token over those that both wrote. Where they part, both tokens must be as
    likely, or the distance is infinite."""
    apart = []
    pairs = zip(found["answer"], alone["answer"], found["chances"], alone["chances"], strict=True)
    for ours, other, chances, expected in pairs:
        apart.append(abs(chances[str(ours)] - expected.get(str(ours), -1e9)))
        if ours != other:
            break
    mean = sum(apart) / len(apart)
    return float("inf") if math.isnan(mean) else mean  # `max` would pass over NaN


def key_of(answer: dict[str, Any]) -> str:
    return json.dumps([answer[name] for name in ("prompt", "cached", "chunk")])


@dataclass(frozen=True)
class Found:
    """The result of a cell."""

    word: str  # `equal`, `WRONG`, `refused`, `FAILED` (to start or to answer) or `NOT COMPARED`
    why: str = ""


def measure(cells: list[Cell], work: Path, jobs: int) -> Iterator[tuple[Cell, Found]]:
    """The distances of cells from the answers to the same requests alone, as soon as they are
    known."""
    asked = {cell: make_job(cell, work, alone=False) for cell in cells}
    served = dict(run_all(asked, work, jobs, "cell"))
    failed = [cell for cell, result in served.items() if _word_of(result) == "FAILED"]
    own = {cell: make_job(cell, work, alone=False, exact=True) for cell in failed}
    for cell, result in run_all(own, work, jobs, "exact"):
        if "error" in result:
            served[cell] = {"error": f"{ITSELF}: {describe_error(result)}"}
    groups: dict[str, list[Cell]] = {}
    alone: dict[str, dict[str, Any]] = {}
    wanted: dict[str, dict[str, dict[str, Any]]] = {}
    for cell, result in served.items():
        if word := _word_of(result):
            yield cell, Found(word, describe_error(result))
            continue
        job = make_job(cell, work, alone=True) | {"chunk": 3}
        name = json.dumps(job)
        groups.setdefault(name, []).append(cell)
        answers = wanted.setdefault(name, {})
        answers.update((key_of(answer), answer) for answer in result["answers"])
        alone[name] = job | {"requests": [*answers.values()]}
    for name, reference in run_all(alone, work, jobs, "alone"):
        for cell in groups[name]:
            yield cell, judge(cell, served[cell], reference, wanted[name])


def judge(
    cell: Cell, result: dict[str, Any], reference: dict[str, Any], wanted: dict[str, Any]
) -> Found:
    if "answers" not in reference:
        return Found("NOT COMPARED", why=reference.get("error", "no reference")[:300])
    alone, beside = (reference["answers"][at::2] for at in (0, 1))
    noise = max(map(distance, beside, alone))
    if noise > LOUDEST:
        return Found("NOT COMPARED", f"a stranger alone changes answers by {noise:.1e}")
    expected = dict(zip(wanted, alone, strict=True))
    far = max(distance(answer, expected[key_of(answer)]) for answer in result["answers"])
    word = "equal" if far <= max(cell.close, TIMES * noise) else "WRONG"
    return Found(word, f"{far:.1e} apart at most, and {noise:.1e} beside a stranger")


def describe_error(result: dict[str, Any]) -> str:
    """Its last line with words."""
    lines = [line for line in result["error"].splitlines() if "further information" not in line]
    return str(lines[-1].strip()[-300:])


def _word_of(result: dict[str, Any]) -> str:
    """The failure of an engine; empty for one that answered."""
    if "error" not in result:
        return ""
    return "refused" if result["error"].startswith(("UnsupportedModel", ITSELF)) else "FAILED"


def run_all(
    jobs: dict[Any, dict[str, Any]], work: Path, at_once: int, name: str
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The results of jobs, distributed over processes."""
    keys = [*jobs]
    shares = [keys[at::at_once] for at in range(at_once) if keys[at::at_once]]
    with ThreadPoolExecutor(at_once) as pool:
        parts = {
            pool.submit(run_worker, [jobs[key] for key in share], work, f"{name}-{number}"): share
            for number, share in enumerate(shares)
        }
        for part in as_completed(parts):
            yield from zip(parts[part], part.result(), strict=True)


def list_cells(rows: str, cells: str | None) -> list[Cell]:
    """The named cells, or all: features alone, and the pairs of the first ones."""
    several = [*((name,) for name in FEATURES), *combinations(PAIRED, 2)]
    if cells:
        several = [tuple(each.split("+")) for each in cells.split(",")]
    listed = [Cell(row, names) for row in rows.split(",") for names in several]
    return [cell for cell in listed if not cell.impossible]


def main() -> None:
    from measuring import make_parser

    parser = make_parser(__doc__)
    parser.add_argument("--rows", default="budget,quick")
    parser.add_argument("--cells", help="names of features, with + between those of a pair")
    parser.add_argument("--jobs", type=int, default=4, help="engines at a time")
    parser.add_argument("--work", type=Path, default=Path("/tmp/matrix"))
    parser.add_argument("--worker", type=Path, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work_off(*args.worker)
        return
    begun, work = time.monotonic(), args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    cells = list_cells(args.rows, args.cells)
    save_models(work, {cell.family for cell in cells})
    wanted = sorted({(cell.row, cell.family) for cell in cells})
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        for ready in [pool.submit(calibrate, work, family, row) for row, family in wanted]:
            ready.result()
    words = set()
    for cell, its in measure(cells, work, args.jobs):
        print(f"{cell.row:7} {'+'.join(cell.names):20} {its.word}: {its.why}", flush=True)
        words.add(its.word)
    print(f"{date.today()}, {time.monotonic() - begun:.0f} s, {os.uname().machine}")
    sys.exit(any(word.isupper() for word in words))


if __name__ == "__main__":
    main()
