"""The results that searches, evaluations and validations record in a manifest."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rotationzoo.storage.strict_json import Strict

Count = Annotated[int, Field(ge=0)]


class _Clip(Strict):
    clip: float


_Sides = Literal["own", "keys", "values", "both"]


class _Kept(Strict):
    """What a search kept for the whole model: the clip ratios, and which sides of its result.

    `by_side` and `trimmed` are divergences of the model's predictions, in nats per token: for each
    combination of sides, and with the clip ratios kept.
    """

    key: _Clip
    value: _Clip
    by_side: dict[_Sides, float]
    kept: _Sides
    trimmed: float


class _Chosen(Strict):
    """The candidate chosen for each head of one side, and its score."""

    candidate: list[str]
    chosen: list[float]

    @model_validator(mode="after")
    def _for_each_head(self) -> "_Chosen":
        if len(self.candidate) != len(self.chosen):
            raise ValueError("not every head has a candidate and its score")
        return self


class ChosenSides(Strict):
    """What a search chose for both sides of one layer."""

    key: _Chosen
    value: _Chosen


class _Candidate(Strict):
    """What one candidate is, and what it loses: nats per token of answers, the share of answers,
    and the divergence of predictions in nats per token."""

    name: str
    divergence: float
    answer_loss: float | None = None
    answers_lost: float | None = None


class _Probes(Strict):
    """The questions that candidates were judged by; none if the model can do no recall task."""

    tasks: list[str]
    questions: Count


class ModelChoice(Strict):
    """The choice among candidates for the whole model, and the test of the winner on other text and
    other questions."""

    criterion: str
    probes: _Probes
    candidates: list[_Candidate]
    baseline: str
    winner: str
    taken: str
    test: list[_Candidate]

    @model_validator(mode="after")
    def _tested(self) -> "ModelChoice":
        tested = {candidate.name for candidate in self.test}
        if not {self.baseline, self.winner, self.taken} <= tested:
            raise ValueError("a winner or a baseline that was not tested")
        return self


class Search(Strict):
    """What a search chose, for the whole model and layer by layer."""

    model: _Kept
    # Earlier versions chose by predictions alone, between fewer candidates.
    choice: ModelChoice | None = None
    layers: dict[Annotated[str, Field(pattern="^[0-9]{1,5}$")], ChosenSides]


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
