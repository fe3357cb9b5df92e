"""Runs a real vLLM in an environment of its own: `python vllm_driver.py JOB.json RESULT.json`.

A job has the options of the engine and rounds of prompts; the prompts of a round are requests at
the same time. The result has the tokens and log probabilities of each, and the engine's blocks.
"""

import json
import sys
from pathlib import Path


def main() -> None:
    from vllm import LLM, SamplingParams

    job, target = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    llm = LLM(**job["engine"])
    # A prompt whose log probabilities are asked for is read whole, also where a prefix is there.
    given = {"prompt_logprobs": 0} if job.get("prompts_too") else {}
    settings = SamplingParams(max_tokens=job["tokens"], temperature=0, logprobs=0, **given)
    rounds = []
    for prompts in job["rounds"]:
        asked = [{"prompt_token_ids": ids} for ids in prompts]
        rounds.append([describe(each) for each in llm.generate(asked, settings, use_tqdm=False)])
    blocks = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    target.write_text(json.dumps({"rounds": rounds, "blocks": blocks}))


def describe(request) -> dict:
    answer = request.outputs[0]
    prompt = request.prompt_logprobs or [None]
    return {
        "ids": [*request.prompt_token_ids, *answer.token_ids],
        "prompt": [only(each) for each in prompt[1:]],
        "answer": [only(each) for each in answer.logprobs],
        "cached": request.num_cached_tokens,
    }


def only(table: dict) -> float:
    """The log probability of the token that is there."""
    return next(iter(table.values())).logprob


if __name__ == "__main__":
    main()
