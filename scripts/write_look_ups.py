"""Calibration text with look-ups: the bundled text, and as much of it again with statements hidden
in it and asked for at the end.

    python scripts/write_look_ups.py MODEL OUTPUT.jsonl [--length 2048]

MODEL is one whose tokenizer cuts the text to prompts. The words are those that searches choose on,
so no question of `evaluate` is among them.
"""

import argparse
import json
import sys
from pathlib import Path

from lab_rows import bundled_texts, tokens_of

from rotationzoo.model import loading
from rotationzoo.model.source import fetch, find
from rotationzoo.recall.prompts import QUOTE, TASKS, PromptSettings, write_prompts

SEED = 1000  # searches ask with seeds near 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("output", type=Path)
    parser.add_argument("--length", type=int, default=2048)
    options = parser.parse_args()
    source = find(options.model)
    fetch(source, weights=False)
    tokenizer = loading.load_tokenizer(source)
    texts = bundled_texts("calibration")
    filler = tokens_of(texts, tokenizer).tolist()
    tasks = [task for task in TASKS if task != QUOTE]
    prompts = -(-len(filler) // options.length // len(tasks))
    for task in tasks:
        settings = PromptSettings(task, prompts, options.length, seed=SEED, pool="choose")
        for prompt in write_prompts(settings, tokenizer, filler):
            texts.append(tokenizer.decode(prompt.ids, skip_special_tokens=True))
    lines = [json.dumps({"text": text}) for text in texts]
    options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
