"""What chunks of a prompt do to answers: questions about needles, as a server's pages answer them.

    python scripts/bench/questions_in_chunks.py ROTATIONS [--model demo] [--questions 1000]
        [--chunks 256,512,8192] [--device cuda]

Each prompt of 1,024 tokens has eight questions. A chunk reads itself and its windows exact, and all
else from codes, as vLLM does with prompts of that `max_num_batched_tokens`; it is simulated, so
neither traffic nor an engine plays a part. For each two sizes it prints how many questions only one
of them answers, and how likely chance alone parts them as unevenly (a sign test).
"""

import argparse
from dataclasses import replace
from itertools import combinations
from math import comb
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rotationzoo
from rotationzoo import Artifact
from rotationzoo.codec.formats import FORMATS
from rotationzoo.codec.rotated import RotatedCodec
from rotationzoo.codec.windows import CacheLayout
from rotationzoo.model.source import find
from rotationzoo.recall.answers import join_answers, read_answers
from rotationzoo.recall.prompts import PromptSettings, write_prompts
from rotationzoo.simulation.simulated import Simulation


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--chunks", default="256,512,8192")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    folder, artifact = find(args.model).folder, Artifact.open(args.artifact)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(args.device)
    text = Path(rotationzoo.__file__).with_name("cache").joinpath("layer.py").read_text() * 3
    settings = PromptSettings("needles", -(-args.questions // 8), length=1024, pool="judge")
    prompts = write_prompts(settings, tokenizer, tokenizer(text).input_ids)
    recipe = CacheLayout.of_recipe(artifact.recipe, FORMATS["vllm"])
    layers, right = {layer.index for layer in artifact.geometry}, {}
    for chunk in map(int, args.chunks.split(",")):
        layout = replace(recipe, prefill_chunk=chunk, prefill_layout="window")
        arm = RotatedCodec(artifact.rotations, rounding="feedback")
        with Simulation(arm, layout, artifact.geometry, layers).running(model):
            answers = join_answers([read_answers(model, [prompt]) for prompt in prompts])
        right[chunk] = answers.correct.cpu()
        print(f"chunks of {chunk}: {int(right[chunk].sum())} of {len(right[chunk])}", flush=True)
    for one, other in combinations(right, 2):
        only, alone = (int((right[a] & ~right[b]).sum()) for a, b in ((one, other), (other, one)))
        apart, fewer = only + alone, min(only, alone)
        chance = min(1.0, 2 * sum(comb(apart, each) for each in range(fewer + 1)) / 2**apart)
        print(f"{one} alone {only}, {other} alone {alone}: by chance {chance:.2g}")


if __name__ == "__main__":
    main()
