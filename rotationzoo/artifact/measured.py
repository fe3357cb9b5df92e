"""The typed results of an evaluation: a `Measured` in `evaluation.json`, and in the manifest a
`Summary` of its first pair of windows."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, model_validator

from rotationzoo.artifact import scores
from rotationzoo.artifact.scores import Errors, Figures
from rotationzoo.codec.formats import BUDGETED
from rotationzoo.storage.strict_json import Count, Sha256


class AboutArm(Figures):
    """One arm. `artifact`: the identity of its artifact, None for a baseline. `pooled`: whether it
    has one rotation per layer instead of the artifact's own."""

    name: str
    kind: Literal["artifact", "baseline"]
    rounding: Literal["nearest", "transform"] = "nearest"
    artifact: Sha256 | None = None
    pooled: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether it is an artifact as most engines serve it: unpooled, with nearest codes."""
        return self.kind == "artifact" and self.rounding == "nearest" and not self.pooled


class Measures(Figures):
    """The cost of one arm. The increase of perplexity is relative to the exact model on the same
    tokens; standard errors are over texts."""

    perplexity: float
    perplexity_increase: float
    standard_error: Errors


class ArmSummary(Measures, AboutArm):
    """The figures of one arm in the manifest. Bits are per cached element, including exact tokens:
    at 131,072 tokens, and at the length of the evaluated texts. `all_tasks`: all tasks together;
    None if the exact model cannot do any of them."""

    bits_per_element: float
    bits_at_length: float
    tasks: Mapping[str, scores.Score]
    all_tasks: scores.Recall | None


class ArmCosts(Measures):
    """The cost of one arm, with the mean loss of each text in nats."""

    text_losses: list[float]


class MeasuredArm(ArmCosts, ArmSummary):
    """All results of one arm with one cache."""

    tasks: Mapping[str, scores.TaskRecall]


class ExactSummary(Figures):
    """The figures of the exact model in the manifest. `tasks`: every task, even those that it
    cannot do. `all_tasks`: those that it can do, together; None if there is none."""

    perplexity: float
    tasks: Mapping[str, scores.Score]
    all_tasks: scores.Recall | None


class ExactCosts(Figures):
    """The perplexity of the exact model, with the mean loss in nats and the tokens of each text."""

    text_tokens: list[int]
    perplexity: float
    text_losses: list[float]


class Exact(ExactCosts, ExactSummary):
    """All results of the exact model."""

    tasks: Mapping[str, scores.ExactTaskRecall]


Arm = TypeVar("Arm", bound=AboutArm)


def arms_of(arms: Mapping[str, Arm], artifact: str) -> list[Arm]:
    """The arms of the artifact with this identity, in order."""
    return [arm for arm in arms.values() if arm.artifact == artifact]


def served_arm(arms: Mapping[str, Arm], artifact: str, format: str) -> Arm | None:
    """The artifact's unpooled arm with the codes of a format: transform coding in `segments`, if
    the artifact has it, or else nearest codes. None if there is no such arm."""
    rounding = "transform" if format == BUDGETED else "nearest"
    mine = [arm for arm in arms_of(arms, artifact) if not arm.pooled]
    return max(mine, key=lambda arm: arm.rounding == rounding, default=None)


class Verdict(Figures):
    """The number of texts, the decision on each artifact, and both in words."""

    texts: Count
    words: list[str]
    decisions: list[scores.Decision] = Field(default_factory=list)

    @classmethod
    def of(cls, texts: int, decisions: list[scores.Decision]) -> "Verdict":
        """The verdict with these decisions."""
        words = [line for decision in decisions for line in decision.words]
        return cls(texts=texts, words=words, decisions=decisions)


class Text(Figures):
    """The text of an evaluation. `length`: tokens of a row."""

    source: str
    fingerprint: str
    rows: Count
    length: Count


class Tasks(Figures):
    """The recall tasks, with prompts of these lengths. Statements are between the position `first`
    and the last `recent` tokens before the questions."""

    names: list[str]
    lengths: list[Count]
    questions: Count
    first: Count
    recent: Count


class Conditions(Figures):
    """How an evaluation was run. `positions`: how many the model was made for."""

    text: Text
    tokens: Count
    format: str
    prefill_chunk: Count | None
    prefill_layout: str | None
    tasks: Tasks
    engine: str | None = None
    positions: Count | None = None


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
    """All results with one pair of exact windows."""

    arms: Mapping[str, MeasuredArm]


class Summary(WindowSummary, Conditions):
    """The summary of an evaluation in a manifest: of its first pair of windows."""

    exact: ExactSummary


class Probe(Figures):
    """A prompt, its greedy continuation of N tokens through the cache of `serve`, and the K most
    probable candidates for each of these tokens `[N, K]`, with their log probabilities in nats
    `[N, K]` through that cache and through an `exact` one."""

    prompt: list[Count]
    tokens: Annotated[list[Count], Field(min_length=1)]
    candidates: list[list[Count]]
    log_probabilities: list[list[float]]
    exact: list[list[float]]

    @model_validator(mode="after")
    def _of_one_shape(self) -> Self:
        tables = self.candidates, self.log_probabilities, self.exact
        shapes = {tuple(map(len, table)) for table in tables}
        if len(shapes) != 1 or len(self.candidates) != len(self.tokens):
            raise ValueError("not every candidate has its log probabilities")
        return self


class Measured(Conditions):
    """`evaluation.json`: all results of an evaluation. `layers`: those with a 2-bit cache.
    `probes`: the answers of a server; empty if no server can read the rotations."""

    model: str
    revision: str | None
    weights_fingerprint: str | None
    first_position: Count
    layers: list[Count]
    notes: list[str]
    rope_scaling: str | None
    exact: Exact
    windows: Annotated[list[Window], Field(min_length=1)]
    probes: list[Probe] = Field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join(self.window.verdict.words) or f"{self.model}: only baselines"

    __repr__ = __str__

    @property
    def window(self) -> Window:
        """The first pair of windows, which tables and pages show."""
        return self.windows[0]

    def report(self) -> dict[str, Any]:
        """The object of `evaluate --json`; `arms` and `verdict` repeat the first window's."""
        content = self.model_dump(exclude={"probes"})
        first = content["windows"][0]
        return {**content, "arms": first["arms"], "verdict": first["verdict"]}

    def summary(self) -> Summary:
        """The figures for the manifest."""
        conditions = {name: getattr(self, name) for name in Conditions.model_fields}
        # Its JSON has only the fields of the summary types.
        return Summary(**conditions, **dict(self.window), exact=self.exact)
