"""The results on a model card: a validation on a GPU, and an evaluation with its table."""

from rotationzoo.artifact.results import EvaluationSummary, TaskSummary, ValidationSummary
from rotationzoo.words import counted

_MEASURES = {"perplexity_increase": "+.2%", "attention_kl": ".4f", "output_error": ".3f"}
"""Measure of an arm -> its number format."""


def validation_section(validation: ValidationSummary | None) -> str:
    """The section on whether the CUDA reference was run on these matrices, and with what result."""
    if validation is None:
        return "\nThe CUDA reference has not been run on these matrices.\n"
    if not validation.on_gpu:
        on_cpu = "only the codec's definition was run on these matrices, on a CPU"
        return f"\nNot validated on a GPU: {on_cpu}.\n"
    all_equal = validation.codes_equal and validation.dequantized_equal
    equal = "bit-equal to" if all_equal else "NOT equal to"
    result = f"codes and values {equal} the definition for {validation.rows:,} rows"
    return f"""
## Validation

On {validation.device}, `int2.cu` gave {result} of all layers and heads
(`validation.json`).
"""


ABOUT_KIVI = (
    "kivi is no rotation: whatever the format, 32 tokens of a key channel share a float16 scale, "
    "and 32 channels of a value (arXiv 2402.02750)"
)
ABOUT_FEEDBACK = (
    "+feedback: the same rotations and the same bytes, but whoever writes the cache chooses the "
    "codes of a key together, by the artifact's factors: RotatedCache does, while engines write "
    "the nearest codes today"
)


def evaluation_section(evaluation: EvaluationSummary | None) -> str:
    """The section on what the rotations and the baselines cost the model; empty without an
    evaluation."""
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
    return f"""
## What it costs the model

{_answers_table(evaluation)}Perplexity of the exact model on {exact}: {evaluation.perplexity:.3f}.
With a 2-bit cache of the format {evaluation.format} and windows {windows}{prefill},
{_describe_errors(evaluation.texts)}:

| rotation | perplexity | attention KL | error of the attention block |
|---|---|---|---|
{rows}
{about}
{verdict}"""


def _answers_table(evaluation: EvaluationSummary) -> str:
    """The table of recall tasks, with a sentence on what they are; empty where no arm was asked."""
    tasks = list(next((arm.tasks for arm in evaluation.arms.values()), {}))
    if not tasks:
        return ""
    lines = []
    models = {"exact": evaluation.exact_tasks}
    models |= {name: arm.tasks for name, arm in evaluation.arms.items()}
    for name, scores in models.items():
        cells = [_score(scores[task]) for task in tasks if task in scores]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    rows = "\n".join(lines)
    return f"""Questions about statements hidden in the text, read from the 2-bit part of the cache:
the share answered exactly, and the mean log probability of the right answers in nats.

| rotation | {" | ".join(tasks)} |
|---|{"---|" * len(tasks)}
{rows}

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
