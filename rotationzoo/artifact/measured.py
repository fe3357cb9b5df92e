"""The one typed model of an evaluation: `evaluate` makes it, and the terminal, the card, the pages,
the index and `regenerate` read it.

`evaluation.json` holds a `Measured`, and the manifest a `Summary` of its first pair of windows. A
field that is annotated with a `Column` is a column of every table of arms.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isclose
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import ConfigDict, Field, model_validator

from rotationzoo.storage.strict_json import Count, Sha256, Strict

_SAME = 1e-3  # of the exact model's perplexity, which another dtype may change more
Errors = dict[str, float | None]
"""Figure -> its standard error; None if there is only one text, or one prompt."""
Outcome = Literal["more", "fewer", "likelier", "less likely", "unclear"]
"""How an arm's answers compare with another's: it answers clearly more or fewer questions; or it
answers about as many, and gives the right answers clearly more or less probability; or neither is
clear."""


@dataclass(frozen=True)
class Column:
    """The title of a figure in tables of arms, and its number format."""

    title: str
    format: str


class Figures(Strict):
    """Figures under the keys of the JSON, where `from_` is `from`.

    A figure may be NaN until it is written: readers and writers of JSON refuse it.
    """

    model_config = ConfigDict(
        alias_generator=lambda name: name.removesuffix("_"),
        validate_by_name=True,
        serialize_by_alias=True,
        allow_inf_nan=True,
    )


Kind = TypeVar("Kind", bound=Figures)


def trim(kind: type[Kind], figures: Figures) -> Kind:
    """The figures that `kind` has too, and no others."""
    return kind(**{name: getattr(figures, name) for name in kind.model_fields})


# ---- answers to recall tasks


class Score(Figures):
    """How some questions were answered."""

    answered: Count
    """Questions whose greedy answer is exactly right."""
    questions: Annotated[int, Field(gt=0)]
    log_probability: float
    """Of the whole right answer, in nats; the mean over questions."""

    @property
    def share(self) -> float:
        """The share of the questions that was answered."""
        return self.answered / self.questions


class Range(Figures):
    """Positions or distances: the first, and the one after the last."""

    from_: Count
    to: Count


class DistanceScore(Score, Range):
    """The questions whose statements lie so many tokens before their answers."""


class DepthScore(Score):
    """The questions whose statements lie in this part of their prompts: 0 is the start, 1 the
    end."""

    from_: float
    to: float


class CellScore(Score):
    """The questions of prompts of one length, in one bucket of distances and one of depths."""

    length: Count
    distance_from: Count
    distance_to: Count
    depth_from: float
    depth_to: float


class LengthScore(Score):
    """How the prompts of one length were answered."""

    length: Count


class Recall(Score):
    """How the questions of one task, or of all, were answered. The standard errors are over
    prompts, of the share answered and of the log probability."""

    standard_error: Errors


class RecallDetails(Recall):
    """The same by distance and by depth, and by length, distance and depth at once: only cells that
    have questions."""

    by_distance: list[DistanceScore]
    by_depth: list[DepthScore]
    by_cell: list[CellScore]


class TaskRecall(RecallDetails):
    """How one task was answered, question by question in the order of prompts."""

    correct: str
    """A digit for each question: 1 if it was answered."""
    log_probabilities: list[float]
    by_length: Sequence[LengthScore]


class ExactLengthScore(LengthScore):
    """How the exact model answered the prompts of one length, with and without the statements."""

    can_do: bool
    without_statements: Score


class ExactTaskRecall(TaskRecall):
    """How the exact model answered one task, at the lengths at which it can do it. Of a task that
    it can do at no length, all lengths are reported."""

    by_length: Sequence[ExactLengthScore]
    """All lengths."""
    can_do: bool
    prompts: list[int]
    """How many questions each prompt asks."""
    distances: list[int]
    """Tokens from each question's statement to its answer."""


# ---- tasks of lm-evaluation-harness


class KeptAnswer(Figures):
    """One answer and the right one. `question` is its number in the task's data."""

    question: int
    right: str
    answer: str


class Pairing(Figures):
    """One metric of an arm compared with the exact model's, over the same questions.

    `lost` counts questions that only the exact model gets right, and `gained` those that only the
    arm does. The p value is McNemar's exact test's: the chance of a split at least as uneven if
    both were as good.
    """

    lost: int
    gained: int
    p_value: float


class HarnessScore(Figures):
    """How one task of the harness was answered."""

    metrics: Errors
    """Each metric under the harness' own name (`acc`, or `exact_match,strict-match` where a filter
    has a name); None where it is no number."""
    standard_error: Errors
    """The harness' own."""
    questions: int | None = None
    row_tokens: float | None = None
    """The mean length of prompt and answer, in tokens."""
    past_windows: float | None = None
    """For an arm, the share of these rows that are longer than the exact windows, so that something
    in them is read in 2 bits."""
    answer_tokens: float | None = None
    """The mean length of generated answers, in tokens."""
    truncated: float | None = None
    """The share of generated answers that reached the task's largest length without a stop string
    or an end token."""
    answers: list[KeptAnswer] = Field(default=[])
    paired: dict[str, Pairing] = Field(default={})
    """For an arm, of each metric that is 0 or 1 for each question."""


class HarnessRecord(Figures):
    """How the harness asked. `version` is lm-evaluation-harness' own."""

    version: str
    tasks: list[str]
    limit: int | None
    chat: bool


# ---- arms


class AboutArm(Figures):
    """What an arm is. `artifact` is the identity of the artifact that it is of, None for a
    baseline; `pooled` says whether it has one rotation per layer in place of the artifact's own."""

    name: str
    kind: Literal["artifact", "baseline"]
    rounding: Literal["nearest", "feedback"] = "nearest"
    artifact: Sha256 | None = None
    pooled: bool = False


class Measures(Figures):
    """The cost of one arm. The standard errors are over texts."""

    perplexity: float
    perplexity_increase: Annotated[float, Column("perplexity", "+.2%")]
    """The relative increase over the exact model on the same tokens."""
    attention_kl: Annotated[float | None, Column("attention KL", ".4f")]
    """In nats, averaged over layers, heads and sampled queries; None if none were sampled."""
    output_error: Annotated[float, Column("block error", ".4f")]
    """Relative RMS error of the attention block's output, averaged over layers."""
    standard_error: Errors


class BucketMeasures(Measures, Range):
    """The same measures at the context lengths of one bucket."""


class HeadMeasures(Figures):
    """The measures of one layer over all texts, one number per KV head in order; None where nothing
    was measured."""

    attention_kl: list[float | None]
    """In nats, averaged over the query heads that read the KV head, and over sampled queries."""
    output_error: list[float | None]
    """Relative RMS error of the attention outputs of the query heads that read the KV head, before
    the output projection: the layer's own is measured behind it."""
    key_row_range: list[float | None]
    """`(max - min) / rms` of a key row, averaged over all rows past the sink, in the coordinates in
    which it is rounded. None for keys that are not rounded, or not row by row."""
    value_row_range: list[float | None]
    """The same of values."""


class LayerMeasures(Figures):
    """The measures of one layer over all texts."""

    layer: Count
    output_error: float
    attention_kl: float | None
    heads: HeadMeasures


class ArmSummary(Measures, AboutArm):
    """The figures of one arm that the manifest keeps. Bits are per cached element, with exact
    tokens: at 131,072 tokens, and at the length of the evaluated texts."""

    bits_per_element: Annotated[float, Column("bits", ".2f")]
    bits_at_length: Annotated[float, Column("bits here", ".2f")]
    tasks: Mapping[str, Score]
    all_tasks: Recall | None
    """All tasks together; None if the exact model can do none of them."""


class ArmCosts(Measures):
    """The measures of one arm, by context length and by layer, and the mean loss of each text."""

    by_length: list[BucketMeasures]
    by_layer: list[LayerMeasures]
    text_losses: list[float]


class MeasuredArm(ArmCosts, ArmSummary):
    """Everything that was measured of one arm with one cache."""

    tasks: Mapping[str, TaskRecall]
    all_tasks: RecallDetails | None
    harness: dict[str, HarnessScore] | None = None


class RangePerplexity(Range):
    """The exact model's perplexity at the context lengths of one bucket."""

    perplexity: float


class ExactSummary(Figures):
    """The figures of the model without a 2-bit cache that the manifest keeps."""

    perplexity: float
    tasks: Mapping[str, Score]
    """Of every task, also of those that it cannot do."""
    all_tasks: Recall | None
    """All tasks that it can do together; None if there is none."""


class ExactCosts(Figures):
    """The perplexity of the exact model, and the mean loss of each text with its tokens."""

    text_tokens: list[int]
    perplexity: float
    by_length: list[RangePerplexity]
    text_losses: list[float]


class Exact(ExactCosts, ExactSummary):
    """Everything that was measured of the model without a 2-bit cache."""

    tasks: Mapping[str, ExactTaskRecall]
    all_tasks: RecallDetails | None
    harness: dict[str, HarnessScore] | None = None


Arm = TypeVar("Arm", bound=AboutArm)


def arms_of(arms: Mapping[str, Arm], artifact: str) -> list[Arm]:
    """The arms of the artifact with this identity, as they are ordered."""
    return [arm for arm in arms.values() if arm.artifact == artifact]


def plain_arm(arms: Mapping[str, Arm], artifact: str) -> Arm | None:
    """The artifact's arm as engines serve it: its own rotations with the nearest codes."""
    for arm in arms_of(arms, artifact):
        if arm.rounding == "nearest" and not arm.pooled:
            return arm
    return None


# ---- verdicts


class Comparison(Figures):
    """The perplexity of an artifact's arm compared with another arm's. Negative differences favor
    the artifact. P values are corrected for all comparisons."""

    arm: str
    other: str
    log_perplexity_difference: float
    standard_error: float | None
    p_value: float | None
    clear: bool


class PairedAnswers(Figures):
    """An arm's answers compared with another arm's. Positive differences favor the first."""

    answered: int
    other_answered: int
    only_arm: int
    """Questions that the arm answers and the other does not."""
    only_other: int
    answers_p_value: float
    """Of the sign-flip permutation test over prompts."""
    log_probability_difference: float
    """In nats an answer."""
    standard_error: float | None
    log_probability_p_value: float | None
    """Of Student's t over prompts; None for a single prompt."""


class AnswerComparison(PairedAnswers):
    """The answers of an artifact's arm compared with another arm's, with p values corrected for all
    comparisons."""

    arm: str
    other: str
    outcome: Outcome


class AnswerVerdict(Figures):
    """All comparisons of answers in a window."""

    questions: int
    prompts: int
    level: float
    comparisons: list[AnswerComparison]
    words: list[str]


class FeedbackComparison(Figures):
    """An arm with error feedback compared with the same rotations and the nearest codes. P values
    are of single tests."""

    arm: str
    """The arm with error feedback."""
    other: str
    answers: PairedAnswers | None
    """None if no recall task was asked."""
    log_perplexity_difference: float
    """Negative if error feedback is better."""
    standard_error: float | None


class VerdictSummary(Figures):
    """How many texts were compared, and the sentences that state the result."""

    texts: Count
    words: list[str]


class Verdict(VerdictSummary):
    """All comparisons of a window: of perplexities and of answers, all of them with the nearest
    codes, and of error feedback with these. The words begin with answers."""

    level: float
    comparisons: list[Comparison]
    answers: AnswerVerdict | None
    """None if no recall task was asked."""
    feedback: list[FeedbackComparison]
    """One for each artifact that has the factors."""


# ---- the whole


class Text(Figures):
    """The text that an evaluation read. `length` is the tokens of a row."""

    source: str
    fingerprint: str
    rows: Count
    length: Count


class Tasks(Figures):
    """Which recall tasks were asked, in prompts of which lengths.

    Statements begin at the position `first` or later, and the last `recent` tokens before the
    questions hold none.
    """

    names: list[str]
    lengths: list[Count]
    questions: Count
    first: Count
    recent: Count


class Conditions(Figures):
    """How an evaluation was run."""

    text: Text
    tokens: Count
    format: str
    prefill_chunk: Count | None
    prefill_layout: str | None
    tasks: Tasks


class WindowSummary(Figures):
    """All arms with one pair of exact windows."""

    sink: Count
    recent: Count
    arms: Mapping[str, ArmSummary]
    verdict: VerdictSummary

    @model_validator(mode="after")
    def _named_alike(self) -> Self:
        for name, arm in self.arms.items():
            if arm.name != name:
                raise ValueError(f"the arm {name!r} is called {arm.name!r}")
        return self


class Window(WindowSummary):
    """The same with everything that was measured."""

    arms: Mapping[str, MeasuredArm]
    verdict: Verdict


class Summary(WindowSummary, Conditions):
    """The summary of an evaluation in a manifest: of its first pair of windows."""

    exact: ExactSummary


class Measured(Conditions):
    """`evaluation.json`: everything that one evaluation measured."""

    model: str
    revision: str | None
    weights_fingerprint: str | None
    first_position: Count
    sides: list[str]
    """Which of keys and values were in 2 bits."""
    layers: list[Count]
    """The layers that read a 2-bit cache."""
    real_cache: bool
    notes: list[str]
    rope_scaling: str | None
    harness: HarnessRecord | None = None
    exact: Exact
    windows: Annotated[list[Window], Field(min_length=1)]

    @property
    def window(self) -> Window:
        """The first pair of windows, whose figures are shown."""
        return self.windows[0]

    def content(self) -> dict[str, Any]:
        """The content of `evaluation.json`, without the keys that nothing was measured for."""
        return self.model_dump(exclude_unset=True)

    def report(self) -> dict[str, Any]:
        """The object that `evaluate --json` prints, whose `arms` and `verdict` repeat those of the
        first pair of windows."""
        content = self.content()
        first = content["windows"][0]
        return {**content, "arms": first["arms"], "verdict": first["verdict"]}

    def summary(self) -> Summary:
        """The figures that the manifest keeps."""
        window = self.window
        arms = {name: _summarize(ArmSummary, arm) for name, arm in window.arms.items()}
        return Summary(
            **dict(trim(Conditions, self)),
            sink=window.sink,
            recent=window.recent,
            arms=arms,
            verdict=trim(VerdictSummary, window.verdict),
            exact=_summarize(ExactSummary, self.exact),
        )

    def differs_from(self, other: "Measured") -> str:
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
        asked = self.tasks.names, self.tasks.lengths, self.tasks.questions
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


Answering = TypeVar("Answering", ArmSummary, ExactSummary)


def _summarize(kind: type[Answering], figures: Answering) -> Answering:
    tasks = {name: trim(Score, score) for name, score in figures.tasks.items()}
    all_tasks = figures.all_tasks and trim(Recall, figures.all_tasks)
    shown: Iterable[str] = kind.model_fields.keys() - {"tasks", "all_tasks"}
    kept = {name: getattr(figures, name) for name in shown}
    return kind(**kept, tasks=tasks, all_tasks=all_tasks)
