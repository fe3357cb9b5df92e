"""A newcomer's first hour: the commands of the README and the quick start with one model.

    python scripts/bench/first_hour.py MODEL [--minutes 10] [--folder FOLDER]

MODEL is a folder or a GGUF file, such as that of SmolLM2 (`scripts/lab/real_models.py` names its
package). It runs plan, calibrate, evaluate, report and generate, one after another in an empty
folder, and then every line after `Next:` that they printed and that has not run yet. Printed are
the seconds of each command and the longest time without a line of output, which no command should
keep for more than ten seconds; then the decision. The exit code is 1 where a command failed, or
nothing was decided.
"""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

NEXT, FOLDER = "Next: ", "Folder: "
SERVERS = {"serve", "push"}
"""Commands that do not end, or that publish: suggestions of these are printed and not run."""


@dataclass(frozen=True)
class Ran:
    """How a command went."""

    words: Sequence[str]
    code: int
    seconds: float
    silent: float
    """The longest time without output, in seconds."""
    lines: list[str]

    def __str__(self) -> str:
        words = shlex.join(self.words)
        return f"{self.seconds:6.0f} s, silent {self.silent:3.0f} s, rc {self.code}: {words}"


def run(words: Sequence[str], folder: Path) -> Ran:
    """Run `rotationzoo` in a folder, and show what it prints."""
    command = [sys.executable, "-m", "rotationzoo", *words]
    print(f"\n$ rotationzoo {shlex.join(words)}", flush=True)
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    begun = last = time.perf_counter()
    silent, lines = 0.0, []
    with subprocess.Popen(command, cwd=folder, env=environment, text=True, **both) as process:
        assert process.stdout is not None
        for line in process.stdout:
            now = time.perf_counter()
            silent, last = max(silent, now - last), now
            lines.append(line.rstrip("\n"))
            print(f"[{now - begun:5.0f}] {lines[-1]}", flush=True)
    ended = time.perf_counter()
    silent = max(silent, ended - last)
    return Ran(words, process.returncode, ended - begun, silent, lines)


def suggestions(ran: Ran) -> list[list[str]]:
    """The commands after `Next:`, without the name of the program."""
    told = [line.partition(NEXT)[2] for line in ran.lines if line.startswith(NEXT)]
    return [words[1:] for words in map(shlex.split, told) if words[0] == "rotationzoo"]


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("model", type=Path)
    parser.add_argument("--minutes", default="10", help="of evaluate")
    parser.add_argument("--folder", type=Path, help="an empty one; else a new one is made")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="first-hour-"))
    model, begun = str(options.model.resolve()), time.perf_counter()
    done = [run(["plan", model], folder), run(["calibrate", model], folder)]
    (made,) = (line.removeprefix(FOLDER) for line in done[1].lines if line.startswith(FOLDER))
    commands = [
        ["evaluate", model, made, "--save", "--minutes", options.minutes],
        ["report", made],
        ["generate", model, "--prompt", "The key/value cache", "--max-new-tokens", "16"],
    ]
    done += [run(words, folder) for words in commands]
    took = time.perf_counter() - begun
    first = len(done)
    asked = [words for ran in done for words in suggestions(ran)]
    for words in asked:
        if words not in [ran.words for ran in done] and words[0] not in SERVERS:
            done.append(run(words, folder))
    print(f"\n{folder}: the first {first} commands took {took / 60:.1f} minutes")
    print(*done, sep="\n")
    decision = [line for line in done[2].lines if line.startswith(("Serve it", "Do not serve it"))]
    print(decision[0] if decision else "Nothing was decided.")
    return int(not decision or any(ran.code for ran in done))


if __name__ == "__main__":
    sys.exit(main())
