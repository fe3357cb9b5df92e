"""What capturing and summing costs: the time of a calibration over that of the plain forward passes
on the same rows.

    python scripts/bench/benchmark_calibrate.py MODEL [--data FILE] [--tokens 16384] [--length 2048]
                                          [--batch 4] [--repeats 3]

All run without the language-model head, in turns, in one process; the ratio of the medians counts.
`key_energy` is the recipe `oscar-v1`, which takes two passes.
"""

import argparse
from collections.abc import Callable

import torch
from loading import DEVICE, compare, load

from rotationzoo.calibration.collect import collect
from rotationzoo.model.capture import decoder
from rotationzoo.recipe import PRESETS, Data


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    print(
        f"{loaded.text.tokens} tokens, rows of {args.length}, batch {args.batch}, {DEVICE}, "
        f"{torch.get_num_threads()} threads"
    )
    compare(jobs, args.repeats, "the forward passes")


if __name__ == "__main__":
    main()
