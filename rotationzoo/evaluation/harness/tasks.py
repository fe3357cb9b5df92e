"""The harness' tasks: found by name, and loaded with their data before any weights are fetched; and
its code, run without its side effects: printing, random seeds, processes."""

import difflib
import json
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from rotationzoo.errors import RotationZooError, UsageError, first_sentence
from rotationzoo.network.huggingface_session import asking_huggingface

INSTALL = "pip install 'lm-eval[ruler]>=0.4.12'"
SEED = 1234  # the harness' own default
_ONE_PROCESS = "DISABLE_MULTIPROC"  # read by the harness
_NEAREST = 5  # names in a hint
_TOKENIZER_CONFIG = "tokenizer_config.json"


@dataclass(frozen=True)
class HarnessSettings:
    """Which of the harness' tasks are answered, and how."""

    tasks: Sequence[str]
    """Names of tasks, groups or tags."""
    limit: int | None = None
    """How many questions of each task are asked; None for all."""
    folder: Path | None = None
    """A folder of the user's own task files, which go before the harness' own."""
    chat: bool = False
    """Whether questions are asked in the model's chat template."""
    answers: int = 0
    """How many answers to each task are kept in words."""

    def check(self) -> None:
        """Raise `RotationZooError` if the harness is not installed, and `UsageError` if there is no
        such folder."""
        _task_manager()
        if self.folder is not None and not self.folder.is_dir():
            raise UsageError(f"{self.folder} is not a folder of tasks")


class TaskLoader:
    """Finds the tasks of some settings at once, and loads their data when a tokenizer is there."""

    def __init__(self, settings: HarnessSettings, lengths: Sequence[int]):
        """Raises as `settings.check` does, and `UsageError` for a task that the harness does not
        know. `lengths` are the tokens per prompt for tasks that can be made of any length (RULER).
        """
        settings.check()
        self.settings = settings
        manager_type = _task_manager()
        self._tokenizer_folder = TemporaryDirectory(prefix="rotationzoo-")
        options = {
            "include_path": settings.folder,
            # What RULER's tasks ask for: they make their prompts themselves.
            "metadata": {"tokenizer": self._tokenizer_folder.name, "max_seq_lengths": [*lengths]},
        }
        with isolated():
            self._manager: Any = None
            if settings.folder is not None:
                # The harness' own list has 14,000 names and takes seconds to read.
                self._manager = manager_type(include_defaults=False, **options)
            if self._manager is None or self._unknown():
                self._manager = manager_type(**options)
        if unknown := self._unknown():
            raise _unknown_task(unknown[0], self._manager.all_tasks)

    def load(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """The tasks with their data, as `lm_eval.evaluator.evaluate` takes them.

        Raises `RotationZooError` for data that cannot be loaded, for a task that would run code
        that a model wrote, and for one that shows images.
        """
        if self.settings.chat and not getattr(tokenizer, "chat_template", None):
            raise UsageError(
                "--harness-chat needs a chat template, which this model's tokenizer lacks",
                hint="leave it out: base models are asked in plain text",
            )
        loaded: dict[str, Any] = {"tasks": {}, "groups": {}}
        with self._tokenizer_folder as folder, isolated():
            save_without_code(tokenizer, Path(folder))
            for name in self.settings.tasks:
                part = self._load_one(name)
                loaded["tasks"] |= part["tasks"]
                loaded["groups"] |= part["groups"]
        for name, task in loaded["tasks"].items():
            _check_task(name, task)
        return loaded

    def _load_one(self, name: str) -> Any:
        try:
            with asking_huggingface():
                return self._manager.load([name])
        except Exception as error:  # each data set and each task's own code fails in its own way
            raise RotationZooError(
                f"the data of the harness' task {name} cannot be loaded: {first_sentence(error)}",
                hint="fetch it once where there is a network, or give a task over a local file "
                "with --harness-path FOLDER",
            ) from error

    def _unknown(self) -> list[str]:
        names = set(self._manager.all_tasks)
        return [name for name in self.settings.tasks if name not in names]


def _task_manager() -> Any:
    """The harness' `TaskManager`. Raises `RotationZooError` if it is not installed."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise RotationZooError(
            "--harness needs lm-evaluation-harness, which is not installed", hint=INSTALL
        ) from error
    if not hasattr(TaskManager, "load"):  # before 0.4.12
        raise RotationZooError(
            "the installed lm-evaluation-harness is older than 0.4.12", hint=f"{INSTALL} --upgrade"
        )
    return TaskManager


def _unknown_task(name: str, names: list[str]) -> UsageError:
    # RULER's tasks are often quoted as ruler_NAME.
    short = name.removeprefix("ruler_")
    nearest = difflib.get_close_matches(short, names, _NEAREST)
    hint = "lm-eval ls tasks prints all names; --harness-path FOLDER adds your own"
    if nearest:
        hint = f"the nearest names are {', '.join(nearest)}"
    return UsageError(f"the harness has no task {name!r}", hint=hint)


def save_without_code(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save a copy of the tokenizer that names no code of its repository.

    RULER's tasks load a tokenizer by its place, with remote code allowed; a model's code is never
    run here.
    """
    tokenizer.save_pretrained(folder)
    path = folder / _TOKENIZER_CONFIG
    config = json.loads(path.read_text("utf-8"))
    config.pop("auto_map", None)
    path.write_text(json.dumps(config), "utf-8")


def _check_task(name: str, task: Any) -> None:
    if getattr(task, "UNSAFE_CODE", False):
        raise RotationZooError(
            f"the harness' task {name} runs code that the model writes, which is refused",
            hint="leave it out, and run it in a sandbox of its own",
        )
    if getattr(task, "MULTIMODAL", False):
        raise RotationZooError(
            f"the harness' task {name} shows images, and only text is evaluated",
            hint="leave it out",
        )


@contextmanager
def isolated() -> Iterator[None]:
    """Inside the block, nothing is printed, random generators start from `SEED`, and no processes
    are forked. Afterwards everything is as it was before."""
    with _hushed(), _seeded(), _in_one_process():
        yield


@contextmanager
def _hushed() -> Iterator[None]:
    """Inside the block, what is printed goes nowhere: the harness prints, and draws bars."""
    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        redirect_stdout(nowhere),
        redirect_stderr(nowhere),
    ):
        yield


@contextmanager
def _seeded() -> Iterator[None]:
    """Inside the block, the global random generators start from `SEED`: tasks that make their own
    prompts make the same ones in every run."""
    state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            random.seed(SEED)
            np.random.seed(SEED)
            torch.manual_seed(SEED)
            yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)


@contextmanager
def _in_one_process() -> Iterator[None]:
    """Inside the block, the harness resamples in this process. Otherwise it would fork, and a
    process that holds a GPU must not."""
    before = os.environ.get(_ONE_PROCESS)
    os.environ[_ONE_PROCESS] = "1"
    try:
        yield
    finally:
        del os.environ[_ONE_PROCESS]
        if before is not None:
            os.environ[_ONE_PROCESS] = before
