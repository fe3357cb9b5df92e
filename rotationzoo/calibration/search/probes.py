"""Probes: prompts of recall tasks, written in held-out text, that rotations are chosen by.

A user of a long context looks things up in it. Perplexity hardly shows whether that works, because
most tokens need no look-up.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from rotationzoo.calibration.search.task import SearchTask
from rotationzoo.errors import RotationZooError
from rotationzoo.recall.answers import read_shared_answers
from rotationzoo.recall.prompts import TASKS, Prompt, PromptSettings, write_prompts

POOL = "choose"
"""The pool of words; `evaluate` asks with the words of another."""
_LENGTH = 2048  # most tokens per prompt: candidates are many, and each reads all prompts
_TRIED = 2  # prompts per task that show whether the model can do it
_ABLE = 0.25  # share of the answers that a model which can do a task gives at least


@dataclass(frozen=True)
class Trial:
    """Which recall tasks the exact model can do."""

    answered: dict[str, float] = field(default_factory=dict)
    """Task -> the share of some questions that the exact model answers."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Task -> why it was not tried."""

    @property
    def able(self) -> list[str]:
        """The tasks that the exact model can do. Only these can show what a cache loses."""
        return [task for task, share in self.answered.items() if share >= _ABLE]


def try_tasks(task: SearchTask) -> Trial:
    """Ask the exact model a few questions of every recall task."""
    trial = Trial()
    if task.tokenizer is None or task.settings.prompts == 0:
        return trial
    for name in TASKS:
        try:
            prompts = _write(task, task.choosing, name, _TRIED, probe_seeds(task)["choosing"])
        except RotationZooError as error:  # the rows are too short for it
            trial.skipped[name] = str(error)
        else:
            answers = read_shared_answers(task.model, prompts, task.batch)
            trial.answered[name] = answers.correct.double().mean().item()
    return trial


def write_probes(task: SearchTask, able: Sequence[str], part: str) -> list[Prompt]:
    """Prompts of the tasks that the model can do, as many of each, in rows that no statistics have
    seen. Those of the part `testing` have another seed than those of `choosing` and are written in
    other rows."""
    rows = {"choosing": task.choosing, "testing": task.testing}[part]
    prompts: list[Prompt] = []
    for name in able:
        count = max(1, task.settings.prompts // len(able))
        prompts += _write(task, rows, name, count, probe_seeds(task)[part])
    return prompts


def probe_length(task: SearchTask) -> int:
    """Tokens per prompt: as many as in the longest row, up to 2,048."""
    return min(_LENGTH, max(len(row) for row in task.choosing))


def probe_seeds(task: SearchTask) -> dict[str, int]:
    """Part -> the seed of its prompts. No part has that of another, or of another recipe seed."""
    return {"choosing": 2 * task.recipe.seed, "testing": 2 * task.recipe.seed + 1}


def _write(
    task: SearchTask, rows: Sequence[torch.Tensor], name: str, count: int, seed: int
) -> list[Prompt]:
    assert task.tokenizer is not None
    cache = task.cache
    settings = PromptSettings(
        name, count, probe_length(task), None, cache.sink, cache.recent, seed, POOL
    )
    return write_prompts(settings, task.tokenizer, torch.cat(list(rows)).tolist())
