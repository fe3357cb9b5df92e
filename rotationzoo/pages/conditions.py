"""How the figures of a page were measured, and what they do not show, in words."""

from rotationzoo.artifact.card_results import (
    ABOUT_FEEDBACK,
    ABOUT_KIVI,
    ABOUT_POOLED,
    describe_prefill,
)
from rotationzoo.artifact.evaluation_file import Evaluation
from rotationzoo.rotations import SIDES
from rotationzoo.simulation.size import CONTEXT
from rotationzoo.words import counted


def describe_conditions(evaluation: Evaluation) -> str:
    """The format, the windows and the text of an evaluation, and what the columns say."""
    window = evaluation.window
    prefill = describe_prefill(evaluation.prefill_chunk, evaluation.prefill_layout)
    texts = counted(evaluation.text.rows, "text")
    return (
        f"Format {evaluation.format}; the first {window.sink} and the last {window.recent} tokens "
        f"are exact{prefill}. Perplexity of {evaluation.tokens:,} tokens in {texts} "
        f"({evaluation.text.source}). Answered: of all questions of the tasks that the exact model "
        "can do, which need not answer all of them. Log probability: of the right answers, the "
        "mean in nats. Cost: the increase of perplexity over the exact model. Bits: per cached "
        f"element at {CONTEXT:,} tokens, with scales, offsets and the exact tokens."
    )


def list_caveats(evaluation: Evaluation, layers: list[int]) -> list[str]:
    """Sentences on what of a model with these cached `layers` was in 2 bits, on what the arms are,
    and what else the evaluation noted."""
    caveats = []
    if set(evaluation.sides) != set(SIDES):
        caveats.append(f"Only {evaluation.sides[0]}s were in 2 bits; the others stayed exact.")
    exact = [str(layer) for layer in layers if layer not in evaluation.layers]
    if evaluation.layers and exact:
        caveats.append(f"Not all layers were in 2 bits: {', '.join(exact)} stayed exact.")
    if len(evaluation.windows) > 1:
        others = [f"{window.sink}/{window.recent}" for window in evaluation.windows[1:]]
        caveats.append(f"Also evaluated, and not shown: windows {', '.join(others)}.")
    arms = evaluation.window.arms
    if f"{evaluation.own_arm}+feedback" in arms:
        caveats.append(f"{ABOUT_FEEDBACK}.")
    if f"{evaluation.own_arm}+pooled" in arms:
        caveats.append(f"{ABOUT_POOLED}.")
    if "kivi" in arms:
        caveats.append(f"{ABOUT_KIVI}.")
    return [*caveats, *(f"{note[:1].upper()}{note[1:]}." for note in evaluation.notes)]
