"""Does a cache of the fewest bits keep as much of questions that its choice has not seen?
("The fewest bits" in docs/tasks.md)

    python scripts/bench/fewest_bits.py MODEL ... [--keep 90] [--output FOLDER]

Each MODEL is calibrated, and the fewest bits that keep so many percent of its answers are chosen
as `rotationzoo calibrate MODEL --keep` chooses them. Then 640 fresh questions (five tasks with
another seed) are asked of what was chosen, or of the most bits where nothing was.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from measuring import make_parser

from rotationzoo import calibrate, evaluate
from rotationzoo.artifact.scores import Decision, plain_name
from rotationzoo.words import percent


def decision_of(report: Mapping[str, Any]) -> Decision:
    return Decision.model_validate(report["verdict"]["decisions"][0])


def describe(decision: Decision) -> str:
    """The share that is kept, its interval, and the outcome."""
    if decision.kept is None or decision.interval is None:
        return decision.words[0]
    low, high = map(percent, decision.interval)
    return f"{percent(decision.kept)} ({low} to {high}), {decision.action}"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--keep", type=float, default=90)
    parser.add_argument("--questions", type=int, default=128, help="fresh ones of each task")
    parser.add_argument("--output", type=Path, default=Path("rotations"))
    options = parser.parse_args()
    how = {"keep": options.keep, "baselines": ()}
    print("| model | chosen | kept | of fresh questions | seconds |\n|---|---|---|---|---|")
    for model in options.models:
        started = time.perf_counter()
        folder = options.output / f"{Path(model).name}-oscar"
        artifact = calibrate(model, output=folder)
        first = evaluate(model, artifact, save=True, fewest_bits=True, **how)
        chosen = decision_of(first)
        seconds = time.perf_counter() - started
        served, bits = folder.with_name(plain_name(chosen.arm)), None
        if chosen.action != "serve":
            served, bits = folder, 4.0
        asked = {"questions": options.questions, "seed": 7, "tokens": 4096}
        fresh = evaluate(model, served, bits=bits, **asked, **how)
        name = f"{plain_name(chosen.arm)}: {chosen.bits:.2f}"
        kept = describe(decision_of(fresh))
        print(f"| {model} | {name} | {describe(chosen)} | {kept} | {seconds:,.0f} |", flush=True)
        for note in first["notes"]:
            print(f"  {note}")


if __name__ == "__main__":
    main()
