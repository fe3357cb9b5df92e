"""Results that commands leave in a manifest: of a search, an evaluation and a validation."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rotationzoo.storage.strict_json import Strict

Count = Annotated[int, Field(ge=0)]


class _Clip(Strict):
    clip: float


_Sides = Literal["own", "keys", "values", "both"]


class _Kept(Strict):
    """The clip ratios that a search kept, and which sides of its result."""

    key: _Clip
    value: _Clip
    by_side: dict[_Sides, float]
    kept: _Sides
    trimmed: float


class _Chosen(Strict):
    """Each head's choice, and its score."""

    candidate: list[str]
    chosen: list[float]

    @model_validator(mode="after")
    def _for_each_head(self) -> "_Chosen":
        if len(self.candidate) != len(self.chosen):
            raise ValueError("not every head has a candidate and its score")
        return self


class ChosenSides(Strict):
    """What a search chose in one layer."""

    key: _Chosen
    value: _Chosen


class Search(Strict):
    """What a search chose, for the whole model and layer by layer."""

    model: _Kept
    layers: dict[Annotated[str, Field(pattern="^[0-9]{1,5}$")], ChosenSides]


class _Arm(Strict):
    """What one rotation costs the model."""

    perplexity_increase: float
    attention_kl: float | None
    output_error: float
    # Earlier versions measured neither standard errors nor, below, texts and verdict.
    standard_error: dict[str, float | None] = Field(default={})


class EvaluationSummary(Strict):
    """What `evaluate --save` measured, in short."""

    text: str
    tokens: Count
    perplexity: float
    format: str
    sink: Count
    recent: Count
    arms: dict[str, _Arm]
    texts: Count | None = None
    verdict: list[str] = Field(default=[])
    prefill_chunk: Count | None = None
    prefill_layout: str | None = None


class ValidationSummary(Strict):
    """What `validate` found, in short."""

    on_gpu: bool
    device: str
    rows: Count
    codes_equal: bool | None
    dequantized_equal: bool | None


class Metrics(Strict):
    """What is known of the quality of the rotations."""

    orthogonality_error: float
    evaluation: EvaluationSummary | None = None
    validation: ValidationSummary | None = None
