"""What capturing and summing costs: time of a calibration over time of the plain forward passes on the same rows.

    python scripts/benchmark_calibrate.py MODEL [--data FILE] [--tokens 16384] [--length 2048] [--batch 4] [--repeats 3]

Both run without the language-model head, in turn, in one process; the ratio of the medians counts. `key_energy` is the
recipe `oscar-v1`, which takes two passes.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from loading import DEVICE, load

from rotationzoo.capture import decoder
from rotationzoo.collect import collect
from rotationzoo.recipe import PRESETS, Data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", default="bundled")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    loaded = load(args.model, dtype, Data(source=args.data, tokens=args.tokens, length=args.length))
    model, geometry, batches = loaded.model, loaded.geometry, loaded.batches(args.batch)

    @torch.no_grad()
    def plain() -> None:
        for ids in batches:
            decoder(model)(input_ids=ids, use_cache=False)

    jobs: dict[str, Callable[[], object]] = {
        "forward": plain,
        "oscar": lambda: collect(model, geometry, batches, PRESETS["oscar"]),
        "key_energy": lambda: collect(model, geometry, batches, PRESETS["oscar-v1"]),
    }
    times: dict[str, list[float]] = {name: [] for name in jobs}
    plain()  # the first pass pays for allocations
    for _ in range(args.repeats):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - start)
    base = statistics.median(times["forward"])
    print(
        f"{loaded.text.tokens} tokens, rows of {args.length}, batch {args.batch}, {DEVICE}, {torch.get_num_threads()} threads"
    )
    for name, seconds in times.items():
        spread = ", ".join(f"{s:.2f}" for s in seconds)
        print(f"{name:12s} {statistics.median(seconds) / base:5.2f} x the forward passes   ({spread} s)")


if __name__ == "__main__":
    main()
