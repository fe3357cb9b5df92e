"""Running the harness' code without its side effects: printing, random seeds, processes."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

import numpy as np
import torch

SEED = 1234  # the harness' own default
_ONE_PROCESS = "DISABLE_MULTIPROC"  # read by the harness


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
    """Inside the block, the harness resamples in this process. Otherwise it would fork, which a
    process that holds a GPU does not bear."""
    before = os.environ.get(_ONE_PROCESS)
    os.environ[_ONE_PROCESS] = "1"
    try:
        yield
    finally:
        del os.environ[_ONE_PROCESS]
        if before is not None:
            os.environ[_ONE_PROCESS] = before
