"""Runs the command line, alone or under torchrun, and writes down how long its passes took.

    torchrun --nproc-per-node 2 scripts/timed_command.py FOLDER calibrate demo ...

Each process writes `begun.RANK` when its passes begin (`collect`), and `seconds.RANK` when they
have ended: the seconds of all, and of those the seconds in which it added up the sums of all
processes (`add`), the wait for the others included.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rotationzoo import ranks


def main(folder: Path, words: list[str]) -> None:
    if ranks.launched_rank() is not None:
        # As the command line does, but before torch is imported: it looks for GPUs only once.
        ranks.use_one_gpu()
        ranks.use_one_gpu = lambda: None
    import torch

    from rotationzoo.calibration import model_run
    from rotationzoo.cli.app import main as run

    rank, collect, add = os.environ.get("RANK", "0"), model_run.collect, ranks.all_reduce
    seconds = {"collect": 0.0, "add": 0.0}

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds[name] += time.perf_counter() - start

    def timed_collect(*arguments: Any, **options: Any) -> Any:
        (folder / f"begun.{rank}").touch()
        with timed("collect"):
            result = collect(*arguments, **options)
        (folder / f"seconds.{rank}").write_text(json.dumps(seconds))
        return result

    def timed_add(sums: Any) -> Any:
        with timed("add"):
            return add(sums)

    model_run.collect, ranks.all_reduce = timed_collect, timed_add
    run(words)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
