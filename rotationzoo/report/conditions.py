"""How the figures of an evaluation were measured, and what they do not show, in the sentences that
the terminal, the card and the pages share."""

from collections.abc import Iterable

from rotationzoo.artifact.measured import ArmSummary, Conditions, Measured
from rotationzoo.codec.size import CONTEXT
from rotationzoo.rotations import SIDES
from rotationzoo.words import counted, number, numbers, percent, sentence

_ABOUT_FEEDBACK = (
    "+feedback: the same rotations and the same bytes, but whoever writes the cache chooses the "
    "codes of a row together, by the artifact's factors: RotatedCache and serve do, and other "
    "engines write the nearest codes"
)
_ABOUT_POOLED = (
    "+pooled: one rotation per layer, fitted from the statistics pooled over KV heads, as "
    "`export --pooled` writes it for engines that take no other"
)
_ABOUT_KIVI = (
    "kivi is no rotation, and always simulated: whatever the format, 32 tokens of a key channel "
    "share a float16 scale, and 32 channels of a value (arXiv 2402.02750)"
)
_ABOUT_RIVALS = (
    "caches of other engines, simulated; they get the exact windows of the other arms, although "
    "most of their engines keep no token exact"
)
ABOUT_BITS = f"bits: of a cached element at {CONTEXT:,} tokens, exact tokens included"


def describe_arms(arms: Iterable[ArmSummary]) -> list[str]:
    """Sentences on the arms whose names do not say what they are, or that were asked less."""
    shown = list(arms)
    about = []
    asked = {arm.name: arm.all_tasks.questions for arm in shown if arm.all_tasks}
    most = max(asked.values(), default=0)
    if fewer := [name for name, questions in asked.items() if questions < most]:
        about.append(
            f"{', '.join(fewer)}: asked the first {asked[fewer[0]]:,} of {most:,} questions, "
            "because the decision compares other arms"
        )
    if any(arm.name == "kivi" and arm.kind == "baseline" for arm in shown):
        about.append(_ABOUT_KIVI)
    ours = {"identity", "hadamard", "random", "kivi"}
    if rivals := [arm.name for arm in shown if arm.kind == "baseline" and arm.name not in ours]:
        about.append(f"{', '.join(rivals)}: {_ABOUT_RIVALS}")
    if any(arm.rounding == "feedback" for arm in shown):
        about.append(_ABOUT_FEEDBACK)
    if any(arm.pooled for arm in shown):
        about.append(_ABOUT_POOLED)
    return about


def describe_prefill(conditions: Conditions) -> str:
    """How an evaluation was prefilled, in words that continue a sentence."""
    if not conditions.prefill_chunk:
        return ""
    exact = "the sink and the recent tokens stay"
    if conditions.prefill_layout == "server":
        exact = "only the sink stays"
    chunk = f"{conditions.prefill_chunk:,}"
    return f", prefilled in chunks of {chunk} tokens between which {exact} exact"


def describe_recall(measured: Measured) -> list[str]:
    """The meaning of the figures of recall tasks; nothing if no question was asked."""
    recall = measured.exact.all_tasks
    if recall is None:
        return []
    cache = "a cache that stores 2 bits" if measured.real_cache else "a simulated 2-bit cache"
    return [
        f"recall: {counted(recall.questions, 'question')} about statements hidden in "
        f"{numbers(measured.tasks.lengths)} tokens, which every arm reads quantized from {cache}; "
        "answered: share that is exactly right ± standard error over prompts, ≥: no fewer than "
        "the exact model; log probability: of the right answer, in nats, also next to the shares; "
        "distance: tokens from statement to answer"
    ]


def describe_drift(measured: Measured) -> list[str]:
    """A sentence on the drift of each arm that was decided on; nothing if it was not measured."""
    sentences, arms = [], measured.drift.arms if measured.drift else {}
    for arm in (each.arm for each in measured.window.verdict.decisions if each.arm in arms):
        words = []
        for part in (arms[arm].by_step[0], arms[arm].by_step[-1]):
            share = percent(part.agreement, 1, part.standard_error.get("agreement"))
            cost = number(part.kl, ".4f", part.standard_error.get("kl"))
            words.append(f"at {share} of tokens {part.from_ + 1:,} to {part.to:,} (KL {cost})")
        sentences.append(f"{arm} generates the exact model's token {' and '.join(words)}.")
    return sentences


def describe_conditions(measured: Measured) -> str:
    """The format, the windows and the text of an evaluation, and what the columns say."""
    window = measured.window
    return (
        f"Format {measured.format}; the first {window.sink} and the last {window.recent} tokens "
        f"are exact{describe_prefill(measured)}. Perplexity of {measured.tokens:,} tokens in "
        f"{counted(measured.text.rows, 'text')} ({measured.text.source}); the exact model's is "
        f"{measured.exact.perplexity:.3f}. Answered: of all questions of the tasks that the exact "
        "model can do, which need not answer all of them. Log probability: of the right answers, "
        "the mean in nats. Perplexity: its increase over the exact model. Bits: per cached element "
        f"at {CONTEXT:,} tokens, and here at {measured.text.length:,}, with scales, offsets and "
        "the exact tokens. ±: standard errors over prompts and texts."
    )


def list_exact_parts(measured: Measured, layers: Iterable[int]) -> list[str]:
    """Sentences on what of a model with these cached `layers` was not in few bits."""
    parts = []
    if set(measured.sides) != set(SIDES):
        parts.append(f"Only {measured.sides[0]}s were in 2 bits; the others stayed exact.")
    exact = [str(layer) for layer in layers if layer not in measured.layers]
    if measured.layers and exact:
        parts.append(f"Not all layers were in 2 bits: {', '.join(exact)} stayed exact.")
    return parts


def list_caveats(measured: Measured) -> list[str]:
    """Sentences on what the arms are, and what else the evaluation noted."""
    caveats = []
    if len(measured.windows) > 1:
        others = [f"{window.sink}/{window.recent}" for window in measured.windows[1:]]
        caveats.append(f"Also evaluated, and not shown: windows {', '.join(others)}.")
    caveats += [f"{about}." for about in describe_arms(measured.window.arms.values())]
    return [*caveats, *map(sentence, measured.notes)]
