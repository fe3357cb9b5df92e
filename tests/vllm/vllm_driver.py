"""Runs a real vLLM in its own environment: `python vllm_driver.py JOB.json RESULT.json`.

A job has the options of an engine and rounds of prompts; the prompts of a round are requests at the
same time. The result has the tokens and log probabilities of each answer, the engine's blocks, and
our metrics. Other jobs: `server` asks a running one with OpenAI's client; `commands` runs our
command line; `configs` lets vLLM make configs; `engines` runs several jobs in turn; `broken` breaks
a worker, which has to notice it. Flags: `late` has a second stream that works as late as it may,
even on a CPU; `planned` counts plans; `held` keeps the engine until the input ends.
"""

import json
import sys
from collections import Counter
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from copy import copy
from dataclasses import replace
from io import StringIO
from pathlib import Path
from unittest.mock import patch


def main() -> None:
    job, target = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    kinds = {"server": ask_server, "commands": run_commands, "configs": make_configs}
    kinds["broken"] = break_worker
    kinds["engines"] = lambda job: [run_engine(each) for each in job["engines"]]
    work = next((kinds[key] for key in kinds if key in job), run_engine)
    write_whole(target, work(job))


def write_whole(target: Path, result) -> None:
    """Write a file that is there only when it is complete."""
    part = target.with_suffix(".part")
    part.write_text(json.dumps(result))
    part.rename(target)


def run_engine(job: dict) -> dict:
    from prometheus_client import generate_latest
    from vllm import LLM, SamplingParams

    if job.get("late"):
        work_late()
    llm = LLM(**job["engine"])
    calls = count_calls() if job.get("planned") else Counter()
    # vLLM reads a prompt whole if asked for its log probabilities, even if a prefix is cached.
    given = {"prompt_logprobs": 0} if job.get("prompts_too") else {}
    given = {"temperature": 0, **given, **job.get("sampling", {})}
    rounds, handed = [], job.get("handed") or [None] * len(job["rounds"])
    for prompts, of_connector in zip(job["rounds"], handed, strict=True):
        more = {"extra_args": {"kv_transfer_params": of_connector}} if of_connector else {}
        settings = SamplingParams(max_tokens=job["tokens"], logprobs=0, **given, **more)
        asked = [{"prompt_token_ids": ids} for ids in prompts]
        requests = llm.generate(asked, settings, use_tqdm=False)
        rounds.append([each for request in requests for each in describe(request)])
    counted = {}
    if not job["engine"].get("disable_log_stats", True):
        counted = {each.name: getattr(each, "value", None) for each in llm.get_metrics()}
    cache = llm.llm_engine.vllm_config.cache_config
    held = {"blocks": cache.num_gpu_blocks, "capacity": cache.kv_cache_size_tokens}
    held["tokens"] = cache.num_gpu_blocks * cache.block_size  # without layers with a window
    said = generate_latest().decode().splitlines()
    held["metrics"] = [line for line in said if line.startswith("rotationzoo_")]
    result = {"rounds": rounds, "counted": counted, "calls": calls, **held}
    if job.get("held"):
        write_whole(Path(sys.argv[2]), result)
        sys.stdin.read()
    return result


def count_calls() -> Counter:
    """How often an engine of this process plans, and how often it runs a step."""
    from rotationzoo.vllm.backend import RotatedWorker
    from rotationzoo.vllm.steps import Planner

    calls = Counter()
    for kind, name in ((Planner, "plan"), (RotatedWorker, "execute_model")):
        own = getattr(kind, name)

        def call(*given, own=own, name=name):
            calls[name] += 1
            return own(*given)

        setattr(kind, name, call)
    return calls


def work_late() -> None:
    """Let the engines of this process store when they are waited for."""
    import torch

    sys.path.append(str(Path(__file__).parents[1]))
    from support.streams import LateStream, play

    play(setattr, LateStream(torch.device("cpu")))


def describe(request) -> list[dict]:
    prompt = request.prompt_logprobs or [None]
    return [
        {
            "ids": [*request.prompt_token_ids, *answer.token_ids],
            "prompt": [only(each).logprob for each in prompt[1:]],
            "answer": [only(each).logprob for each in answer.logprobs],
            "cached": request.num_cached_tokens,
            "handed": request.kv_transfer_params,
        }
        for answer in request.outputs
    ]


def ask_server(job: dict) -> list[list[int]]:
    """The rank of every token of each prompt but the first, among what could be in its place."""
    from openai import OpenAI

    client = OpenAI(base_url=job["server"], api_key="none")
    (model,) = client.models.list().data
    ranks = []
    for ids in job["prompts"]:
        options = {"prompt_logprobs": 0}
        answer = client.completions.create(
            model=model.id, prompt=ids, max_tokens=1, temperature=0, extra_body=options
        )
        ranks.append([only(each)["rank"] for each in answer.choices[0].prompt_logprobs[1:]])
    return ranks


def run_commands(job: dict) -> list[dict]:
    """How each command ends, and what it prints."""
    from rotationzoo.cli.app import main

    ends = []
    for words in job["commands"]:
        out, err = StringIO(), StringIO()
        try:
            with redirect_stdout(out), redirect_stderr(err):
                main(words)
        except SystemExit as end:
            ends.append({"code": end.code or 0, "out": out.getvalue(), "err": err.getvalue()})
    return ends


def make_configs(job: dict) -> list[dict]:
    """The worker of each config, or why there is none, and whose backend a CPU has then."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    made = []
    for options in job["configs"]:
        try:
            worker = EngineArgs(**options).create_engine_config().parallel_config.worker_cls
        except Exception as error:
            worker = f"{type(error).__name__}: {error}"
        made.append({"worker": worker, "backend": AttentionBackendEnum.CPU_ATTN.get_path()})
    return made


def break_worker(job: dict) -> dict[str, str]:
    """The error of a worker that is broken in each way, and whether its pages are unchanged."""
    import torch
    from vllm import LLM

    from rotationzoo.errors import RotationZooError

    llm = LLM(**job["engine"])
    worker = llm.llm_engine.model_executor.driver_worker.worker
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    caches, said = [layer.kv_cache.view(torch.uint8) for layer in layers], {}
    for cache in caches:
        cache.random_(256)
    before = [cache.clone() for cache in caches]
    again = patch.object(type(worker).__base__, "initialize_from_config", lambda *_: None)
    for name, way in ways_to_break(*layers).items():
        with again, way:
            try:
                worker.initialize_from_config(worker.model_runner.kv_cache_config)
                said[name] = ""
            except RotationZooError as error:
                said[name] = str(error)
    same = [torch.equal(*pair) for pair in zip(caches, before, strict=True)]
    return said | {"pages": str(all(same))}


def ways_to_break(first, second, *_) -> dict:
    from rotationzoo.codec.attention import ExactWindow
    from rotationzoo.codec.page_layout import PageLayout
    from rotationzoo.rotations import Rotations
    from rotationzoo.vllm.backend import RotatedBuilder
    from rotationzoo.vllm.pages import LayerPages

    reader, pages = first.impl.reader, first.impl.reader.pages
    others = Rotations({0: second.impl.reader.pages.codec.rotations[1]})
    swapped = copy(pages)
    swapped.codec = replace(pages.codec, rotations=others)
    dequantize = PageLayout.dequantize

    def keys_alone(self, window) -> ExactWindow:
        keys = self.copies["key"], self.copies["key"]
        return ExactWindow(*keys, window.lengths, window.starts, window.slots)

    return {
        "nothing": nullcontext(),
        "rotations": patch.multiple(reader, pages=swapped, _turns=None),
        "layout": patch.dict(pages.memory, value=pages.memory["key"]),
        "codes": patch.object(PageLayout, "dequantize", lambda *given: dequantize(*given).roll(1)),
        "windows": patch.object(LayerPages, "_window", keys_alone),
        "kernel": patch.object(LayerPages, "attend", lambda *given: given[-1].zero_()),
        "hook": patch.object(RotatedBuilder, "build", lambda self: None),
    }


def only(table: dict):
    """What is said of the token that is there."""
    return next(iter(table.values()))


if __name__ == "__main__":
    main()
