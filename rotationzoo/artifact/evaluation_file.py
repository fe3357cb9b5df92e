"""What `evaluation.json` holds, as typed data: the figures that pages and pictures show.

Keys that earlier versions did not write are optional. What is shown of them says so.
"""

from math import isclose
from typing import Annotated, Self

from pydantic import Field, model_validator

from rotationzoo.artifact.results import Count
from rotationzoo.artifact.store import EVALUATION, Artifact
from rotationzoo.storage import strict_json
from rotationzoo.storage.files import regular_file
from rotationzoo.storage.strict_json import Strict

_SAME = 1e-3  # of the exact model's perplexity, which another dtype may change more
_Asked = Annotated[int, Field(gt=0)]


class Score(Strict):
    """How questions were answered."""

    answered: Count
    questions: _Asked
    log_probability: float
    """The mean over questions, in nats."""


class CellScore(Score):
    """The questions of one length whose statements are so far away and so deep in the text."""

    length: Count
    distance_from: Count
    distance_to: Count
    depth_from: float
    depth_to: float


class Summary(Score):
    """The questions of one task, or of all."""

    standard_error: dict[str, float | None] = Field(default={})
    by_cell: list[CellScore] | None = None


class Heads(Strict):
    """Measures of one layer, a number per KV head. None where one was not measured."""

    attention_kl: list[float | None]
    output_error: list[float | None]
    key_row_range: list[float | None]
    value_row_range: list[float | None]


class LayerFigures(Strict):
    """The measures of one layer."""

    layer: Count
    output_error: float
    attention_kl: float | None
    heads: Heads | None = None


class _Range(Strict):
    from_: Annotated[Count, Field(alias="from")]
    to: Count
    perplexity: float


class Bucket(_Range):
    """An arm's measures at the context lengths of one bucket."""

    perplexity_increase: float
    attention_kl: float | None


class Arm(Strict):
    """What one arm costs the model."""

    perplexity: float
    perplexity_increase: float
    attention_kl: float | None
    output_error: float
    standard_error: dict[str, float | None] = Field(default={})
    by_length: list[Bucket] = Field(default=[])
    by_layer: list[LayerFigures] = Field(default=[])
    tasks: dict[str, Summary] = Field(default={})
    all_tasks: Summary | None = None
    bits_per_element: float | None = None


class Exact(Strict):
    """The model without a 2-bit cache."""

    perplexity: float
    by_length: list[_Range] = Field(default=[])
    tasks: dict[str, Summary] = Field(default={})
    all_tasks: Summary | None = None


class _Text(Strict):
    source: str
    fingerprint: str
    rows: Count
    length: Count


class _Tasks(Strict):
    names: list[str]
    lengths: list[Count]
    questions: Count


class _Verdict(Strict):
    words: list[str] = Field(default=[])
    texts: Count | None = None


class Window(Strict):
    """All arms with one pair of exact windows."""

    sink: Count
    recent: Count
    arms: dict[str, Arm]
    verdict: _Verdict


class Evaluation(Strict):
    """`evaluation.json`."""

    own_arm: str
    """The arm of the artifact in whose folder the file is."""
    model: str
    revision: str | None = None
    weights_fingerprint: str | None = None
    text: _Text
    tokens: Count
    format: str
    exact: Exact
    windows: Annotated[list[Window], Field(min_length=1)]
    tasks: _Tasks | None = None
    sides: list[str] = Field(default=["key", "value"])
    layers: list[Count] = Field(default=[])
    real_cache: bool = False
    prefill_chunk: Count | None = None
    prefill_layout: str | None = None
    rope_scaling: str | None = None
    notes: list[str] = Field(default=[])

    @model_validator(mode="after")
    def _with_own_arm(self) -> Self:
        for window in self.windows:
            if self.own_arm not in window.arms:
                raise ValueError(f"no figures of its own arm, {self.own_arm!r}")
        return self

    @property
    def window(self) -> Window:
        """The first pair of windows, whose figures are shown."""
        return self.windows[0]

    def differs_from(self, other: "Evaluation") -> str:
        """In what two evaluations differ whose figures may not stand in one picture; empty if they
        may."""
        mine, others = self._conditions(), other._conditions()
        for words, condition in mine.items():
            if condition != others[words]:
                return words
        same = isclose(self.exact.perplexity, other.exact.perplexity, rel_tol=_SAME)
        return "" if same else "perplexity of the exact model"

    def _conditions(self) -> dict[str, object]:
        """Words -> what must be equal."""
        asked = self.tasks and (self.tasks.names, self.tasks.lengths, self.tasks.questions)
        counted = self.exact.all_tasks and self.exact.all_tasks.questions
        return {
            "model": (self.model, self.revision, self.weights_fingerprint),
            "text": (self.text.fingerprint, self.text.rows, self.text.length),
            "number of tokens": self.tokens,
            "format": self.format,
            "windows": (self.window.sink, self.window.recent),
            "quantized part": (self.sides, self.layers, self.real_cache),
            "prefill": (self.prefill_chunk, self.prefill_layout),
            "RoPE scaling": self.rope_scaling,
            "questions": (asked, counted),
        }


def read_evaluation(artifact: Artifact) -> Evaluation | None:
    """The evaluation in an artifact's folder; None if `evaluate --save` has not added one.

    Raises `RotationZooError` for a damaged file.
    """
    if EVALUATION not in artifact.manifest.files:
        return None
    path = regular_file(artifact.folder, EVALUATION)
    return strict_json.validate(Evaluation, strict_json.read(path), str(path))
