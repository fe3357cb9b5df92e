"""The typed model of an evaluation: `evaluate` makes it, and everything that shows one reads it.

`evaluation.json` holds a `Measured`, and the manifest a `Summary` of its first pair of windows.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, model_validator

from rotationzoo.artifact import scores
from rotationzoo.artifact.scores import Errors, Figures
from rotationzoo.codec.formats import BUDGETED
from rotationzoo.storage.strict_json import Count, Sha256

# ---- arms


class AboutArm(Figures):
    """What an arm is. `artifact` is the identity of its artifact, None for a baseline; `pooled`
    says whether it has one rotation per layer instead of the artifact's own."""

    name: str
    kind: Literal["artifact", "baseline"]
    rounding: Literal["nearest", "transform"] = "nearest"
    artifact: Sha256 | None = None
    pooled: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether this is an artifact as most engines serve it: unpooled, with nearest codes."""
        return self.kind == "artifact" and self.rounding == "nearest" and not self.pooled


class Measures(Figures):
    """The cost of one arm; standard errors are over texts."""

    perplexity: float
    perplexity_increase: float
    """The relative increase over the exact model on the same tokens."""
    standard_error: Errors


class ArmSummary(Measures, AboutArm):
    """The figures of one arm in the manifest. Bits are per cached element, exact tokens included:
    at 131,072 tokens, and at the length of the evaluated texts."""

    bits_per_element: float
    bits_at_length: float
    tasks: Mapping[str, scores.Score]
    all_tasks: scores.Recall | None
    """All tasks together; None if the exact model can do none of them."""


class ArmCosts(Measures):
    """The measures of one arm, and the mean loss of each text."""

    text_losses: list[float]


class MeasuredArm(ArmCosts, ArmSummary):
    """Everything that was measured of one arm with one cache."""

    tasks: Mapping[str, scores.TaskRecall]


class ExactSummary(Figures):
    """The figures of the exact model in the manifest."""

    perplexity: float
    tasks: Mapping[str, scores.Score]
    """Of every task, also those that it cannot do."""
    all_tasks: scores.Recall | None
    """All tasks that it can do together; None if there is none."""


class ExactCosts(Figures):
    """The perplexity of the exact model, and the mean loss and the tokens of each text."""

    text_tokens: list[int]
    perplexity: float
    text_losses: list[float]


class Exact(ExactCosts, ExactSummary):
    """Everything that was measured of the exact model."""

    tasks: Mapping[str, scores.ExactTaskRecall]


Arm = TypeVar("Arm", bound=AboutArm)


def arms_of(arms: Mapping[str, Arm], artifact: str) -> list[Arm]:
    """The arms of the artifact with this identity, in order."""
    return [arm for arm in arms.values() if arm.artifact == artifact]


def served_arm(arms: Mapping[str, Arm], artifact: str, format: str) -> Arm | None:
    """The artifact's unpooled arm with the codes of a format: those of transform coding in
    `segments`, if it has any, or else the nearest. None if there is no such arm."""
    rounding = "transform" if format == BUDGETED else "nearest"
    mine = [arm for arm in arms_of(arms, artifact) if not arm.pooled]
    return max(mine, key=lambda arm: arm.rounding == rounding, default=None)


# ---- verdicts


class Verdict(Figures):
    """The number of texts, the decision on each artifact, and the sentences that state it."""

    texts: Count
    words: list[str]
    decisions: list[scores.Decision] = Field(default_factory=list)

    @classmethod
    def of(cls, texts: int, decisions: list[scores.Decision]) -> "Verdict":
        """The verdict that some decisions make."""
        words = [line for decision in decisions for line in decision.words]
        return cls(texts=texts, words=words, decisions=decisions)


# ---- the whole


class Text(Figures):
    """The text that an evaluation read. `length` is the tokens of a row."""

    source: str
    fingerprint: str
    rows: Count
    length: Count


class Tasks(Figures):
    """The recall tasks that were asked, in prompts of these lengths. Statements stand between the
    position `first` and the last `recent` tokens before the questions."""

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
    engine: str | None = None
    """The engine that the user named."""
    positions: Count | None = None
    """The positions that the model was made for."""


class WindowSummary(Figures):
    """All arms with one pair of exact windows."""

    sink: Count
    recent: Count
    arms: Mapping[str, ArmSummary]
    verdict: Verdict

    @model_validator(mode="after")
    def _same_names(self) -> Self:
        for name, arm in self.arms.items():
            if arm.name != name:
                raise ValueError(f"the arm {name!r} is called {arm.name!r}")
        return self


class Window(WindowSummary):
    """Everything that was measured of all arms with one pair of exact windows."""

    arms: Mapping[str, MeasuredArm]


class Summary(WindowSummary, Conditions):
    """The summary of an evaluation in a manifest: of its first pair of windows."""

    exact: ExactSummary


class Probe(Figures):
    """A prompt with the N most probable tokens after it, through the cache that `serve` makes, and
    the K most probable candidates for each of these, with log probabilities in nats."""

    prompt: list[Count]
    tokens: Annotated[list[Count], Field(min_length=1)]
    candidates: list[list[Count]]
    """`[N, K]`, as all that follows."""
    log_probabilities: list[list[float]]
    """Through that cache."""
    exact: list[list[float]]
    """Through an exact one."""

    @model_validator(mode="after")
    def _of_one_shape(self) -> Self:
        tables = self.candidates, self.log_probabilities, self.exact
        shapes = {tuple(map(len, table)) for table in tables}
        if len(shapes) != 1 or len(self.candidates) != len(self.tokens):
            raise ValueError("not every candidate has its log probabilities")
        return self


class Measured(Conditions):
    """`evaluation.json`: everything that one evaluation measured."""

    model: str
    revision: str | None
    weights_fingerprint: str | None
    first_position: Count
    layers: list[Count]
    """The layers that read a 2-bit cache."""
    notes: list[str]
    rope_scaling: str | None
    exact: Exact
    windows: Annotated[list[Window], Field(min_length=1)]
    probes: list[Probe] = Field(default_factory=list)
    """What a server with the artifact's rotations answers; empty where none can read them."""

    def __str__(self) -> str:
        return "\n".join(self.window.verdict.words) or f"{self.model}: baselines alone"

    __repr__ = __str__

    @property
    def window(self) -> Window:
        """The first pair of windows, whose figures are shown."""
        return self.windows[0]

    def report(self) -> dict[str, Any]:
        """The object of `evaluate --json`; `arms` and `verdict` repeat the first window's."""
        content = self.model_dump(exclude={"probes"})
        first = content["windows"][0]
        return {**content, "arms": first["arms"], "verdict": first["verdict"]}

    def summary(self) -> Summary:
        """The figures that the manifest keeps."""
        conditions = {name: getattr(self, name) for name in Conditions.model_fields}
        # The JSON of a summary has only the fields of its own types.
        return Summary(**conditions, **dict(self.window), exact=self.exact)
