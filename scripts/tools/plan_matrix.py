"""Turn the plan of `rotationzoo regenerate --plan --json` into outputs of a GitHub job: the matrix
of models that are due, and whether there are any.

    python scripts/tools/plan_matrix.py plan.json [--runners gpu-24gb=24GiB,gpu-80gb=H100]
        [-- MODEL]

`--runners` names the labels of GPU runners with their memory, as `rotationzoo plan --gpu` takes it,
smallest first. Each row then has a `runner`: the first that holds the model's weights and the rest
that a calibration needs. The last one takes all larger models.
"""

import argparse
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_MODEL = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"
BESIDE = 4_000_000_000  # bytes; the statistics of Qwen3-8B took 2.1 GB beside its weights


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.add_argument("plan", type=Path)
    parser.add_argument("only", nargs="?", default="", metavar="MODEL")
    parser.add_argument("--runners", default="")
    args, unknown = parser.parse_known_args()
    # A person types the model that starts the workflow, so it is checked.
    for word in (args.only, *unknown):
        if word and not re.fullmatch(_MODEL, word):
            raise SystemExit(f"Error: {word[:80]!r} is no model of the hub: write it as owner/name")
    choose = runner_chooser(args.runners) if args.runners else None
    rows = matrix_rows(json.loads(args.plan.read_text())["models"], args.only, choose)
    print(f"matrix={json.dumps({'include': rows})}")
    print(f"any={json.dumps(bool(rows))}")


def matrix_rows(
    models: list[dict[str, Any]], only: str, choose: Callable[[str, str], str] | None
) -> list[dict[str, str]]:
    """A row for each recipe file whose model is due, or for `only` one of the models."""
    rows = []
    listed = [due["model"] for due in models]
    for due in models:
        model, revision, recipe = due["model"], due["revision"], due["recipe"]
        if only in ("", model):
            name = model.replace("/", "__")  # of a build artifact, which may have no slash
            if listed.count(model) > 1:  # two build artifacts of one name would be an error
                name += f"__{Path(recipe).stem}"
            row = {"model": model, "revision": revision, "recipe": recipe, "name": name}
            if choose is not None:
                row["runner"] = choose(model, revision)
            rows.append(row)
    return rows


def runner_chooser(runners: str) -> Callable[[str, str], str]:
    """Chooses a label for a model and its revision, by the size of the weights on the hub."""
    from rotationzoo.capacity.plan import Wish, measure_capacity, parse_card
    from rotationzoo.model.placement import USABLE

    cards = {}
    for runner in runners.split(","):
        label, _, memory = runner.partition("=")
        cards[label] = parse_card(memory)

    def choose(model: str, revision: str) -> str:
        wish = Wish(model, 1, 1, next(iter(cards.values())), revision=revision)
        room = {label: int(card.count * card.memory * USABLE) for label, card in cards.items()}
        return smallest_runner(measure_capacity(wish).weights["published"], room)

    return choose


def smallest_runner(weights: int, room: Mapping[str, int]) -> str:
    """The first label whose memory holds these bytes of weights, or else the last."""
    for label, usable in room.items():
        if weights + BESIDE <= usable:
            return label
    return label


if __name__ == "__main__":
    main()
