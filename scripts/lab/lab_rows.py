"""The text that lab models are trained on: rows of source code, most of which ask about themselves.

`read_sources` reads a folder of Python sources and leaves out whatever is in the bundled texts, so
that a model trained on it has seen neither of them. `write_rows` cuts the text into rows of token
ids, and hides recall tasks in three quarters of them. Their words come from the sources; those of
`POOLS`, which rotations are chosen and judged on, are left out.
"""

import functools
import json
import multiprocessing
import os
import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from rotationzoo.model.source import DEMO
from rotationzoo.recall.prompts import Prompt, PromptSettings, write_prompts
from rotationzoo.recall.questions import POOLS, TASKS
from rotationzoo.text.rows import start_tokens

BUNDLED = {name: DEMO.parent / f"{name}.jsonl" for name in ("calibration", "evaluation")}
INSTALLED = {"site-packages", "dist-packages"}
LARGEST_FILE = 300_000  # bytes; larger files are tables of data
FILES = 200  # that are tokenized at a time
# Releases of Python differ in a few lines of a file, so a held-out file is known by its lines.
SHARED_LINES, LINE_LENGTH = 0.2, 20
PROCESSES = min(os.cpu_count() or 1, 32)  # a container may count its host's cores
GROUP, CHUNK = 8, 80  # rows of one layout, and rows that a process writes at a time
FEW = 4  # chunks that need no further process
PLAIN, ONE_TASK, TWO_TASKS = 2, 4, 2  # how often a group has this layout
TOKENS_PER_SET = 1024  # tokens that have room for all questions of a task in `TASKS`
ANSWER_WEIGHT = 8  # of an answer's token in the loss, beside 1 of any other
WORD = re.compile(r"(?<![A-Za-z])[a-z]{3,9}(?![A-Za-z])")
WORDS, WORDS_AT_ONCE, POOL = 4096, 48, "lab"


def bundled_texts(name: str) -> list[str]:
    """The documents of a bundled text."""
    lines = BUNDLED[name].read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines]


def read_sources(folders: Iterable[Path]) -> list[str]:
    """The Python sources of the folders, without installed packages and the bundled texts."""
    texts = []
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            is_installed = INSTALLED & set(path.relative_to(folder).parts)
            if not is_installed and (text := _read_unseen(path)):
                texts.append(text)
    return texts


def _read_unseen(path: Path) -> str | None:
    """A file's text; None for one of the bundled texts, an empty one or one of data."""
    if path.stat().st_size > LARGEST_FILE:
        return None
    text = path.read_text(encoding="utf-8", errors="ignore")
    lines = _lines(text)
    seen = len(lines & _bundled_lines()) > SHARED_LINES * len(lines)
    return None if seen or not lines else text


@functools.cache
def _bundled_lines() -> set[str]:
    return {line for name in BUNDLED for text in bundled_texts(name) for line in _lines(text)}


def _lines(text: str) -> set[str]:
    """The lines of a text that are long enough to be its own."""
    lines = (line.strip() for line in text.splitlines())
    return {line for line in lines if len(line) >= LINE_LENGTH}


def tokens_of(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """The texts' tokens `[N]`, int16, without start tokens, each followed by the end token."""
    end, parts = tokenizer.eos_token_id, []
    for at in range(0, len(texts), FILES):
        several = list(texts[at : at + FILES])
        rows = tokenizer(several, add_special_tokens=False, verbose=False).input_ids
        parts += [np.array([*ids, end], dtype=np.int16) for ids in rows]
    return np.concatenate(parts)


def common_words(texts: Iterable[str]) -> list[str]:
    """The words that recall tasks are made of in training: frequent ones, none of `POOLS`."""
    counts = Counter(word for text in texts for word in WORD.findall(text))
    for words in POOLS.values():
        for word in words:
            del counts[word]
    return [word for word, _ in counts.most_common(WORDS)]


@dataclass(frozen=True)
class Source:
    """What rows are written from."""

    tokenizer: PreTrainedTokenizerBase
    tokens: np.ndarray
    words: list[str]
    seed: int


# Inherited by the processes that work on it, which is faster than sending it.
_source: Source


def write_rows(source: Source, length: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """At least `count` rows: token ids `[N, length]` int16, and the weight of each token in the
    loss, uint8."""
    global _source
    _source = source
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # which would not survive the fork
    jobs = [(length, number) for number in range(-(-count // CHUNK))]
    # A process that has threads, as one of the tests has, must not fork: a lock may be held that
    # nobody lets go.
    chunks = [_write_chunk(job) for job in jobs[:FEW]]
    if len(jobs) > FEW:
        forking = multiprocessing.get_context("fork")
        with forking.Pool(PROCESSES, torch.set_num_threads, (1,)) as pool:
            chunks += pool.map(_write_chunk, jobs[FEW:])
    return np.concatenate([ids for ids, _ in chunks]), np.concatenate([w for _, w in chunks])


def _write_chunk(job: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    length, number = job
    draw = random.Random(f"{_source.seed} {length} {number}")
    groups = [_write_group(draw, length) for _ in range(CHUNK // GROUP)]
    return np.concatenate([ids for ids, _ in groups]), np.concatenate([w for _, w in groups])


def _write_group(draw: random.Random, length: int) -> tuple[np.ndarray, np.ndarray]:
    """`GROUP` rows of one layout."""
    parts = draw.choices((0, 1, 2), (PLAIN, ONE_TASK, TWO_TASKS))[0]
    if not parts:
        starts = [draw.randrange(len(_source.tokens) - length) for _ in range(GROUP)]
        ids = np.stack([_source.tokens[start : start + length] for start in starts])
        first = start_tokens(_source.tokenizer)
        ids[:, : len(first)] = first
        return ids, np.ones_like(ids, dtype=np.uint8)
    written = [_write_tasks(draw, length // parts) for _ in range(parts)]
    ids = np.concatenate([ids for ids, _ in written], axis=1)
    return ids, np.concatenate([weights for _, weights in written], axis=1)


def _write_tasks(draw: random.Random, length: int) -> tuple[np.ndarray, np.ndarray]:
    """`GROUP` rows of one task, with the same number of questions."""
    task = draw.choice(list(TASKS))
    POOLS[POOL] = draw.sample(_source.words, WORDS_AT_ONCE)
    settings = PromptSettings(
        task=task,
        prompts=GROUP,
        length=length,
        questions=draw.randint(1, TASKS[task] * length // TOKENS_PER_SET),
        # Statements may be anywhere, so that near answers are learned as well as far ones.
        first=0,
        recent=0,
        seed=draw.randrange(1 << 62),
        pool=POOL,
    )
    start = draw.randrange(len(_source.tokens) - GROUP * length)
    filler = _source.tokens[start : start + GROUP * length].tolist()
    prompts = write_prompts(settings, _source.tokenizer, filler)
    ids = np.stack([prompt.ids.numpy() for prompt in prompts]).astype(np.int16)
    return ids, np.stack([_weights(prompt) for prompt in prompts])


def _weights(prompt: Prompt) -> np.ndarray:
    weights = np.ones(len(prompt.ids), dtype=np.uint8)
    for question in prompt.questions:
        weights[question.answer] = ANSWER_WEIGHT
    return weights


def unseen_prompts(
    tokenizer: PreTrainedTokenizerBase, length: int, prompts: int
) -> dict[str, list[Prompt]]:
    """Prompts of each task in the bundled calibration text, with words that training left out."""
    filler = tokens_of(bundled_texts("calibration"), tokenizer).tolist()
    settings = [PromptSettings(task, prompts, length, pool="judge") for task in TASKS]
    return {each.task: write_prompts(each, tokenizer, filler) for each in settings}
