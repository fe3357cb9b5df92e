"""How long `rotationzoo --help` takes, the median of a few processes, and what it imports of the
slow libraries.

python scripts/benchmark_help.py
"""

import statistics
import subprocess
import sys
import time

SLOW = "torch", "transformers", "datasets", "modelscope", "modelscope_hub", "huggingface_hub"


def main() -> None:
    program = "import sys; sys.argv[1:] = ['--help']; from rotationzoo.cli.app import app; app(standalone_mode=False); "
    program += f"print([name for name in {SLOW} if name in sys.modules])"
    times = []
    for _ in range(7):
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        )
        times.append(time.perf_counter() - start)
    print(
        f"{statistics.median(times):.3f} s; of the slow libraries it imported: {done.stdout.splitlines()[-1]}"
    )


if __name__ == "__main__":
    main()
