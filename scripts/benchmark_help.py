"""How long `rotationzoo --help` takes, as the median of a few processes, and which of the slow
libraries it imports.

    python scripts/benchmark_help.py
"""

import statistics
import subprocess
import sys
import time

SLOW = "torch", "transformers", "datasets", "modelscope", "modelscope_hub", "huggingface_hub"
PROGRAM = f"""
import runpy
import sys
sys.argv[1:] = ["--help"]
try:
    runpy.run_module("rotationzoo", run_name="__main__")
except SystemExit:  # which ends every command
    pass
print([name for name in {SLOW} if name in sys.modules])
"""


def main() -> None:
    times = []
    for _ in range(7):
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
        )
        times.append(time.perf_counter() - start)
    imported = done.stdout.splitlines()[-1]
    print(f"{statistics.median(times):.3f} s; of the slow libraries it imported: {imported}")


if __name__ == "__main__":
    main()
