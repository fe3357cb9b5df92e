"""What simulating a 2-bit cache costs: the time of one arm over that of the exact model on the same
rows.

    python scripts/bench/benchmark_evaluate.py MODEL [--data FILE] [--tokens 8192] [--length 2048]
                                         [--repeats 3]

Both compute the losses of the tokens past the windows; an arm also computes each attention block's
exact output, to compare its own with.
"""

import torch
from loading import load_chosen, make_text_parser
from measuring import Job, compare

from rotationzoo.artifact.fit import fit
from rotationzoo.codec.layout import CacheLayout
from rotationzoo.codec.rotated import RotatedCodec
from rotationzoo.evaluation.forward import attention_modules, token_losses
from rotationzoo.recipe.loading import PRESETS
from rotationzoo.simulation.simulated import Observers, Simulation


def main() -> None:
    parser = make_text_parser(__doc__, tokens=8192, length=2048)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    loaded = load_chosen(args)
    batches, cache, start = loaded.batches(1), CacheLayout(), CacheLayout().first_quantized
    arm = RotatedCodec(fit(None, PRESETS["hadamard"], loaded.geometry))
    layers = {layer.index for layer in loaded.geometry}
    modules = attention_modules(loaded.model, batches[0][:, :32])

    def exact() -> None:
        for ids in batches:
            token_losses(loaded.model, ids, start)

    def simulated(queries: torch.Tensor | None) -> None:
        simulation = Simulation(arm, cache, loaded.geometry, layers, queries=queries)
        for ids in batches:
            with simulation.running(loaded.model, modules, Observers()):
                token_losses(loaded.model, ids, start)

    jobs: dict[str, Job] = {
        "exact": exact,
        "one arm": lambda: simulated(None),
        "with KL": lambda: simulated(torch.arange(start, args.length, (args.length - start) // 32)),
    }
    with torch.no_grad():
        compare(jobs, args.repeats, "the exact model")


if __name__ == "__main__":
    main()
