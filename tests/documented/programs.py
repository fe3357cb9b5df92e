"""The programs that pages show, as forks of one process that has imported everything.

    python programs.py SOCKET MODULE...     serves until its standard input ends

`rotationzoo ...` is the command line, with small jobs. `python -` runs what it is sent.
`python scripts/...` stops as soon as the script has understood its arguments.
"""

import argparse
import importlib
import runpy
import sys
from pathlib import Path
from typing import NoReturn

sys.path[0] = str(Path(__file__).parents[1])

from documented import small_jobs  # noqa: E402
from support.process_server import wait_for_words  # noqa: E402


def run(program: str, *words: str) -> None:
    sys.argv = [program, *words]
    if program == "rotationzoo":
        runpy.run_module("rotationzoo", run_name="__main__", alter_sys=True)
    elif words == ("-",):
        exec(compile(sys.stdin.read(), "the page", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = list(words)
        sys.path[0] = str(Path(words[0]).parent)
        argparse.ArgumentParser.parse_args = understand_only
        runpy.run_path(words[0], run_name="__main__")
        sys.exit(f"{words[0]} ended without a look at its arguments")


def understand_only(parser: argparse.ArgumentParser, *given: list[str]) -> NoReturn:
    _, unknown = parser.parse_known_args(*given)
    sys.exit(f"{parser.prog} has no {unknown[0]}" if unknown else 0)


if __name__ == "__main__":
    socket_path, *modules = sys.argv[1:]
    for module in modules:
        importlib.import_module(module)
    small_jobs.shrink()
    run(*wait_for_words(socket_path))
