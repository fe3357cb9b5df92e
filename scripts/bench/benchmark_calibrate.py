"""What capturing and summing costs: the time of a calibration over that of the plain forward passes
on the same rows.

    python scripts/bench/benchmark_calibrate.py MODEL [--data FILE] [--tokens 16384] [--length 2048]
                                          [--batch 4] [--repeats 3]

All run without the language-model head, in turns, in one process; the ratio of the medians counts.
`key_energy` is the recipe `oscar-v1`, which takes two passes.
"""

import torch
from loading import load_chosen, make_text_parser
from measuring import Job, compare

from rotationzoo.calibration.collect import collect
from rotationzoo.model.capture import decoder
from rotationzoo.recipe.loading import PRESETS


def main() -> None:
    parser = make_text_parser(__doc__, tokens=16384, length=2048)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    loaded = load_chosen(args)
    model, geometry, batches = loaded.model, loaded.geometry, loaded.batches(args.batch)

    @torch.no_grad()
    def plain() -> None:
        for ids in batches:
            decoder(model)(input_ids=ids, use_cache=False)

    jobs: dict[str, Job] = {
        "forward": plain,
        "oscar": lambda: collect(model, geometry, batches, PRESETS["oscar"]),
        "key_energy": lambda: collect(model, geometry, batches, PRESETS["oscar-v1"]),
    }
    compare(jobs, args.repeats, "the forward passes")


if __name__ == "__main__":
    main()
