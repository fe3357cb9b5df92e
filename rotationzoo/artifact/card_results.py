"""The results on a model card: the answers, and what an evaluation says of the cost."""

from rotationzoo.artifact.results import ArmSummary, EvaluationSummary, TaskSummary
from rotationzoo.words import counted

_MEASURES = {"perplexity_increase": "+.2%", "attention_kl": ".4f", "output_error": ".3f"}
"""Measure of an arm -> its number format."""


ABOUT_KIVI = (
    "kivi is no rotation: whatever the format, 32 tokens of a key channel share a float16 scale, "
    "and 32 channels of a value (arXiv 2402.02750)"
)
ABOUT_FEEDBACK = (
    "+feedback: the same rotations and the same bytes, but whoever writes the cache chooses the "
    "codes of a row together, by the artifact's factors: RotatedCache does, while engines write "
    "the nearest codes today"
)

ABOUT_POOLED = (
    "+pooled: one rotation per layer, fitted from the statistics pooled over KV heads, as "
    "`export --pooled` writes it for engines that take no other"
)


def own_arms(evaluation: EvaluationSummary) -> dict[str, ArmSummary]:
    """The artifact's own arms, which come first: with the nearest codes and, if it has the factors,
    with error feedback."""
    first = next(iter(evaluation.arms), "")
    names = first, f"{first}+feedback"
    return {name: arm for name, arm in evaluation.arms.items() if name in names}


def answers_section(evaluation: EvaluationSummary | None) -> str:
    """The table of recall tasks, with a sentence on what they are; empty where no arm was asked."""
    arms = {} if evaluation is None else evaluation.arms
    tasks = list(next((arm.tasks for arm in arms.values()), {}))
    if evaluation is None or not tasks:
        return ""
    lines = []
    models = {"exact": evaluation.exact_tasks}
    models |= {name: arm.tasks for name, arm in arms.items()}
    for name, scores in models.items():
        asked = [scores[task] for task in tasks if task in scores]
        lines.append(f"| {name} | {_share(asked)} | {' | '.join(map(_score, asked))} |")
    rows = "\n".join(lines)
    lengths = " and ".join(f"{length:,}" for length in evaluation.task_lengths)
    hidden = f"{lengths} tokens of text" if lengths else "the text"
    return f"""Questions about statements hidden in {hidden}, read from the 2-bit part of the cache:
the share answered exactly, and the mean log probability of the right answers in nats.

| rotation | all | {" | ".join(tasks)} |
|---|---|{"---|" * len(tasks)}
{rows}

"""


def _share(scores: list[TaskSummary]) -> str:
    """The share of all questions that is answered."""
    if not scores:
        return ""
    answered = sum(score.answered for score in scores)
    questions = sum(score.questions for score in scores)
    return f"{answered / questions:.0%}"


def evaluation_section(evaluation: EvaluationSummary | None) -> str:
    """The section on what the rotations and the baselines cost the model, and which differ clearly;
    empty without an evaluation."""
    if evaluation is None:
        return ""
    lines = []
    for name, arm in evaluation.arms.items():
        cells = []
        for key, format in _MEASURES.items():
            error = arm.standard_error.get(key)
            cells.append(_with_error(getattr(arm, key), error, format))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    rows = "\n".join(lines)
    verdict = "".join(f"* {words}\n" for words in evaluation.verdict)
    exact = f"{counted(evaluation.tokens, 'token')} past the windows of `{evaluation.text}`"
    windows = f"{evaluation.sink}/{evaluation.recent}"
    prefill = describe_prefill(evaluation.prefill_chunk, evaluation.prefill_layout)
    # Evaluations by earlier versions lack this arm.
    about = f"\n{ABOUT_KIVI[0].upper()}{ABOUT_KIVI[1:]}.\n" if "kivi" in evaluation.arms else ""
    if any(name.endswith("+feedback") for name in evaluation.arms):
        about = f"\n{ABOUT_FEEDBACK}.\n{about}"
    if any(name.endswith("+pooled") for name in evaluation.arms):
        about = f"\n{ABOUT_POOLED}.\n{about}"
    return f"""## What it costs the model

Perplexity of the exact model on {exact}: {evaluation.perplexity:.3f}.
With a 2-bit cache of the format {evaluation.format} and windows {windows}{prefill},
{_describe_errors(evaluation.texts)}:

| rotation | perplexity | attention KL | error of the attention block |
|---|---|---|---|
{rows}
{about}
{verdict}
"""


def _score(score: TaskSummary) -> str:
    return f"{score.answered / score.questions:.0%}, {score.log_probability:.2f}"


def describe_prefill(prefill_chunk: int | None, prefill_layout: str | None) -> str:
    """How an evaluation was prefilled, in words that continue a sentence."""
    if not prefill_chunk:
        return ""
    # Earlier versions had only the `window` layout and did not name it.
    exact = "the sink and the recent tokens stay"
    if prefill_layout == "server":
        exact = "only the sink stays"
    return f", prefilled in chunks of {prefill_chunk:,} tokens between which {exact} exact"


def _describe_errors(texts: int | None) -> str:
    if texts is None:  # evaluated by an earlier rotationzoo
        return "without standard errors"
    if texts == 1:
        return "one text, of which no standard error can be given"
    return f"± standard error over {counted(texts, 'text')}"


def _with_error(value: float | None, error: float | None, format: str) -> str:
    if value is None:
        return ""
    if error is None:
        return f"{value:{format}}"
    return f"{value:{format}} ±{error:{format.removeprefix('+')}}"
