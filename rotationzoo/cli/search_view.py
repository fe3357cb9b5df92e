"""What a search chose and kept, in two sentences for `calibrate` and as a table for `inspect`."""

from typing import Any

from rotationzoo.cli.output import say, table

# What a search kept: nothing ("own"), or its choices for one side or both.
_KEPT_SIDES = {"own": (), "keys": ("key",), "values": ("value",), "both": ("key", "value")}
_KEPT = {
    "own": "nothing: the rotations are those that the recipe makes without a search",
    "keys": "what was chosen for keys; values as without a search",
    "values": "what was chosen for values; keys as without a search",
    "both": "what was chosen for keys and values",
}
_COMPARED = {
    "own": "without a search",
    "keys": "keys chosen",
    "values": "values chosen",
    "both": "both chosen",
}


def search_sentences(search: dict[str, Any]) -> list[str]:
    """What was chosen for the whole model, and what that does to its answers and predictions.

    `search` is that of a manifest.
    """
    if "choice" in search:
        choice = search["choice"]
        tested = {candidate["name"]: candidate for candidate in choice["test"]}
        taken, baseline = tested[choice["taken"]], tested[choice["baseline"]]
        if taken is baseline:
            return [_unchanged_sentence(choice, baseline, tested[choice["winner"]])]
        return [
            f"Chosen by {choice['criterion']}",
            f"Chosen: {choice['taken']}",
            f"On text and questions that did not choose it: {_losses(taken)}; "
            f"as the recipe is without a search: {_losses(baseline)}",
        ]
    model = search["model"]
    clips = f"{model['key']['clip']:g} for keys and {model['value']['clip']:g} for values"
    by_side = [f"{nats:.4f} {_COMPARED[name]}" for name, nats in model["by_side"].items()]
    return [
        f"Divergence of the model's predictions in nats: {', '.join(by_side)}",
        f"Kept of the search: {_KEPT[model['kept']]}; "
        f"clip ratios {clips} ({model['trimmed']:.4f} nats)",
    ]


def _unchanged_sentence(
    choice: dict[str, Any], baseline: dict[str, Any], winner: dict[str, Any]
) -> str:
    """One sentence about a search that leaves the recipe's own rotations as they are."""
    rest = f"on text and questions that chose nothing: {_losses(baseline)}"
    if winner is baseline:
        return (
            f"The search found nothing better than the recipe's own rotations ({baseline['name']}) "
            f"by {choice['criterion']}; {rest}"
        )
    return (
        f"The search takes the recipe's own rotations ({baseline['name']}): {winner['name']} won "
        f"by {choice['criterion']}, but failed its test; {rest}, beside {_losses(winner)}"
    )


def _losses(candidate: dict[str, Any]) -> str:
    """What a candidate loses, in words."""
    predictions = f"predictions diverge by {candidate['divergence']:.4f} nats"
    if "answer_loss" not in candidate:
        return predictions
    lost, nats = candidate["answers_lost"], candidate["answer_loss"]
    return f"{lost:.1%} of the answers lost, {nats:.4f} nats a token of them, {predictions}"


def show_search(search: dict[str, Any]) -> None:
    """Print the candidates for the whole model, and what was kept for each head, with its score on
    held-out text.

    `search` is that of a manifest.
    """
    if "choice" in search:
        _show_candidates(search["choice"])
    rows = _rows(search["layers"], _KEPT_SIDES[search["model"]["kept"]])
    if rows:
        columns = ["layer", "head", "basis", "score"]
        table("chosen on text that nothing was fitted to", columns, rows, folded=["basis"])
        say(
            "score: error of the block, and attention KL of keys, relative to the same rotations "
            "without a choice by head"
        )
    if missing := _missing_projections(search["layers"]):
        say(f"Scored without the output projection, which was not readable: {missing}")
    say(*search_sentences(search))


def _show_candidates(choice: dict[str, Any]) -> None:
    rows = []
    for candidate in choice["candidates"]:
        answers = ["-", "-"]
        if "answer_loss" in candidate:
            answers = [f"{candidate['answers_lost']:.1%}", f"{candidate['answer_loss']:.4f}"]
        rows.append([candidate["name"], *answers, f"{candidate['divergence']:.4f}"])
    columns = ["candidate, clip ratios", "answers lost", "nats", "divergence"]
    table("what was tried for the whole model", columns, rows)


def _rows(layers: dict[str, Any], kept_sides: tuple[str, ...]) -> list[list[str]]:
    rows = []
    for layer, sides in layers.items():
        for side in kept_sides:
            choices = zip(sides[side]["candidate"], sides[side]["chosen"], strict=True)
            for head, (basis, score) in enumerate(choices):
                rows.append([f"{layer} {side}s", str(head), basis, f"{score:.2f}"])
    return rows


def _missing_projections(layers: dict[str, Any]) -> str:
    """The layers whose heads were scored without their output projection, and the reasons."""
    by_reason: dict[str, list[str]] = {}
    for sides in layers.values():
        projections = sides.get("projection", {})  # earlier versions did not record these
        for layer, kept in projections.items():
            if kept.startswith("identity: "):
                by_reason.setdefault(kept.removeprefix("identity: "), []).append(layer)
    groups = [f"layers {', '.join(numbers)} ({reason})" for reason, numbers in by_reason.items()]
    return "; ".join(groups)
