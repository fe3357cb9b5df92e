"""Runs the command line, alone or under torchrun, and writes down when its passes began and ended.

    torchrun --nproc-per-node 2 scripts/bench/timed_command.py FOLDER calibrate demo ...

Each process writes `begun.RANK` when its passes begin, and `times.RANK` in the end: the seconds by
the clock at which they began (`start`), at which it had its own sums (`own`), and at which it had
those of all processes (`end`).
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from rotationzoo import ranks


def main(folder: Path, words: list[str]) -> None:
    if ranks.launched_rank() is not None:
        # As the command line does, but before torch is imported: it looks for GPUs only once.
        ranks.use_one_gpu()
        ranks.use_one_gpu = lambda: None
    import torch

    from rotationzoo.calibration import collect as module
    from rotationzoo.calibration import model_run
    from rotationzoo.cli.app import main as run

    rank, collect, add = os.environ.get("RANK", "0"), model_run.collect, module.sum_over_ranks
    times: dict[str, float] = {}

    def note(name: str) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times[name] = time.time()

    def timed_collect(*arguments: Any, **options: Any) -> Any:
        (folder / f"begun.{rank}").touch()
        note("start")
        result = collect(*arguments, **options)
        note("end")
        (folder / f"times.{rank}").write_text(json.dumps(times))
        return result

    def timed_add(*arguments: Any) -> Any:
        note("own")
        return add(*arguments)

    model_run.collect, module.sum_over_ranks = timed_collect, timed_add
    run(words)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
