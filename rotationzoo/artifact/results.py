"""The results that evaluations and validations record in a manifest."""

from typing import Annotated

from pydantic import Field

from rotationzoo.storage.strict_json import Strict

Count = Annotated[int, Field(ge=0)]


class TaskSummary(Strict):
    """How the questions of one recall task were answered."""

    answered: Count
    questions: Annotated[int, Field(gt=0)]
    log_probability: float


class ArmSummary(Strict):
    """What one arm costs the model."""

    perplexity_increase: float
    attention_kl: float | None
    output_error: float
    # Earlier versions measured no standard errors and asked nothing, and their summaries have no
    # `texts` and no `verdict`.
    standard_error: dict[str, float | None] = Field(default={})
    tasks: dict[str, TaskSummary] = Field(default={})


class EvaluationSummary(Strict):
    """The summary of what `evaluate --save` measured."""

    text: str
    tokens: Count
    perplexity: float
    format: str
    sink: Count
    recent: Count
    arms: dict[str, ArmSummary]
    exact_tasks: dict[str, TaskSummary] = Field(default={})
    """What the exact model answered, tasks that it cannot do included."""
    task_lengths: list[Count] = Field(default=[])
    """Tokens of the prompts. Earlier versions did not record them."""
    texts: Count | None = None
    verdict: list[str] = Field(default=[])
    prefill_chunk: Count | None = None
    prefill_layout: str | None = None


class ValidationSummary(Strict):
    """The summary of what `validate` found."""

    on_gpu: bool
    device: str
    rows: Count
    codes_equal: bool | None
    dequantized_equal: bool | None


class Metrics(Strict):
    """What has been measured of the rotations' quality so far."""

    orthogonality_error: float
    evaluation: EvaluationSummary | None = None
    validation: ValidationSummary | None = None
