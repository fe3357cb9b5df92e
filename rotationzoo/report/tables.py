"""The tables of an evaluation, the memory of a cache, and sentences on how it was measured."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from rotationzoo.artifact import measured as schema
from rotationzoo.artifact.measured import ArmSummary, Measured, MeasuredArm
from rotationzoo.artifact.scores import ALL_ELSE, Score
from rotationzoo.artifact.store import Artifact
from rotationzoo.codec.formats import SEGMENTS, SGLANG
from rotationzoo.codec.options import Rounding
from rotationzoo.codec.rotated import RotatedCodec
from rotationzoo.codec.size import CONTEXT, EXACT_BITS, codec_bits
from rotationzoo.codec.windows import CacheLayout
from rotationzoo.geometry import cached_layers
from rotationzoo.words import byte_count, counted, number, numbers, percent

EXACT = "exact"
_COSTS = {
    "perplexity_increase": ("perplexity", "+.2%"),
    "bits_per_element": ("bits", ".2f"),
    "bits_at_length": ("bits here", ".2f"),
}
"""Figure of an arm -> the title of its column, and its number format."""
_OWN_BASELINES = "identity", "hadamard", ALL_ELSE, "random", "kivi"


@dataclass(frozen=True)
class Table:
    """Cells as people read them. The first column names the row."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """The table as Markdown, without its title."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cost_table(arms: Mapping[str, ArmSummary]) -> Table:
    """The cost of every arm, by the label that is shown."""
    rows = [[label] for label in arms]
    for row, arm in zip(rows, arms.values(), strict=True):
        for name, (_, format) in _COSTS.items():
            row.append(number(getattr(arm, name), format, arm.standard_error.get(name)))
    return Table("cost", ["arm", *(title for title, _ in _COSTS.values())], rows)


def recall_tables(exact: schema.ExactSummary, arms: Mapping[str, ArmSummary]) -> list[Table]:
    """The answers of the exact model and of every arm, to all tasks and to each, if asked."""
    models = [(label, arm.all_tasks, arm.tasks) for label, arm in arms.items()]
    asked = [(label, recall, scores) for label, recall, scores in models if recall is not None]
    if exact.all_tasks is None or not asked:
        return []
    # All arms are asked the tasks that the exact model can do.
    of_arms = {task for arm in arms.values() for task in arm.tasks}
    tasks = [task for task in exact.tasks if task in of_arms]
    together, by_task = list[list[str]](), list[list[str]]()
    for label, recall, scores in [(EXACT, exact.all_tasks, exact.tasks), *asked]:
        errors, most = recall.standard_error, exact.all_tasks.share
        answered = share_words(recall, most, 1, errors.get("answered"))
        lost = number(recall.log_probability, ".2f", errors.get("log_probability"))
        together.append([label, answered, lost])
        by_task.append([label, *(_score(scores[task], exact.tasks[task]) for task in tasks)])
    return [
        Table("recall: all tasks", ["arm", "answered", "log probability"], together),
        Table("recall by task", ["arm", *tasks], by_task),
    ]


def evaluation_tables(measured: Measured, window: schema.Window) -> list[Table]:
    """All tables of one pair of windows, answers first."""
    return [*recall_tables(measured.exact, window.arms), cost_table(window.arms)]


def _score(score: Score, most: Score) -> str:
    return f"{share_words(score, most.share)} {score.log_probability:.1f}"


def share_words(score: Score, most: float, digits: int = 0, error: float | None = None) -> str:
    """The share answered; `≥` if it beats the `most` of the exact model, which is chance."""
    if score.share > most:
        return f"≥{percent(most, digits)}"
    return percent(score.share, digits, error)


ABOUT_BITS = f"bits: of a cached element at {CONTEXT:,} tokens, exact tokens included"


def describe_arms(arms: Iterable[ArmSummary]) -> list[str]:
    """Sentences on arms whose names need an explanation, or that were asked fewer questions."""
    shown = list(arms)
    about = []
    asked = {arm.name: arm.all_tasks.questions for arm in shown if arm.all_tasks}
    most = max(asked.values(), default=0)
    if fewer := [name for name, questions in asked.items() if questions < most]:
        about.append(
            f"{', '.join(fewer)}: asked the first {asked[fewer[0]]:,} of {most:,} questions, "
            "because the decision compares other arms"
        )
    baselines = [arm.name for arm in shown if arm.kind == "baseline"]
    if ALL_ELSE in baselines:
        about.append(f"{ALL_ELSE}: a Hadamard matrix in place of the rotations, all else the same")
    if "kivi" in baselines:
        about.append(
            "kivi is not a rotation, and always simulated: in every format, 32 tokens of a key "
            "channel share a float16 scale, and 32 channels of a value (arXiv 2402.02750)"
        )
    if rivals := [name for name in baselines if name not in _OWN_BASELINES]:
        about.append(
            f"{', '.join(rivals)}: caches of other engines, simulated; they get the exact windows "
            "of the other arms, although most of their engines keep no token exact"
        )
    if any(arm.rounding == "transform" for arm in shown):
        about.append(
            "+transform: channels that do not correlate, each with 0 to 8 bits, as RotatedCache "
            "and serve store them; other engines write the nearest codes of rotated rows"
        )
    if any(arm.pooled for arm in shown):
        about.append(
            "+pooled: one rotation per layer, fitted from the statistics pooled over KV heads, as "
            "`export --pooled` writes it for engines that take no other"
        )
    return about


def describe_prefill(conditions: schema.Conditions) -> str:
    """How an evaluation was prefilled, as the end of a sentence."""
    if not conditions.prefill_chunk:
        return ""
    exact = "the sink and the recent tokens stay"
    if conditions.prefill_layout == "server":
        exact = "only the sink stays"
    chunk = f"{conditions.prefill_chunk:,}"
    return f", prefilled in chunks of {chunk} tokens between which {exact} exact"


def describe_recall(measured: Measured) -> list[str]:
    """The meaning of the figures of recall tasks, if any were asked."""
    recall = measured.exact.all_tasks
    if recall is None:
        return []
    return [
        f"recall: {counted(recall.questions, 'question')} about statements hidden in "
        f"{numbers(measured.tasks.lengths)} tokens, which every arm reads from a simulated 2-bit "
        "cache; answered: share that is exactly right ± standard error over prompts, "
        "≥: no fewer than the exact model; log probability: of the right answer, in nats, also "
        "next to the shares"
    ]


@dataclass(frozen=True)
class Request:
    """A request of `context` tokens, each of `elements` of which a `share` was quantized."""

    context: int
    elements: int
    share: float = 1.0

    @classmethod
    def measured_on(cls, artifact: Artifact, measured: Measured | None, context: int) -> Self:
        """A request to the artifact's model, with the layers quantized as measured."""
        layers = cached_layers(artifact.geometry)
        total = sum(layer.elements for layer in layers)
        if measured is None or not measured.layers:
            return cls(context, total)
        stored = [layer.elements for layer in layers if layer.index in measured.layers]
        return cls(context, total, sum(stored) / total)

    def arm_bits(self, arm: MeasuredArm, measured: Measured) -> float:
        """Bits per element of an arm's cache, from those at `CONTEXT` tokens; off by at most one
        group for arms that quantize tokens in groups."""
        exact = measured.window.sink + measured.window.recent
        if exact >= CONTEXT:
            return EXACT_BITS
        stored = (arm.bits_per_element * CONTEXT - EXACT_BITS * exact) / (CONTEXT - exact)
        quantized = self.share * max(0, self.context - exact) / self.context
        return quantized * stored + (1 - quantized) * EXACT_BITS

    @property
    def scale(self) -> tuple[float, str]:
        """The factor that turns bits per element into a unit, and that unit."""
        size = self.elements * self.context / 8
        factor, unit = (1e9, "GB") if size * EXACT_BITS >= 1e9 else (1e6, "MB")
        return size / factor, f"{unit} of cache at {self.context:,} tokens"

    def describe_saving(self, bits: float) -> str:
        """One sentence on what a cache of `bits` bits per element saves."""
        if not 0 < bits < EXACT_BITS:
            return f"At {self.context:,} tokens, the cache stays exact: nothing is saved."
        each = self.elements * self.context / 8
        held, exact = byte_count(each * bits), byte_count(each * EXACT_BITS)
        return (
            f"At {self.context:,} tokens in every layer, the cache takes {held} in place of "
            f"{exact}: {EXACT_BITS / bits:.1f} times smaller."
        )


def stored_bits(artifact: Artifact, tokens: int) -> float:
    """Bits per element of a cache of `tokens` tokens, as the artifact's own recipe stores it."""
    recipe, rotations = artifact.recipe, artifact.rotations
    rounding: Rounding = "transform" if rotations.has_transform else "nearest"
    codec = RotatedCodec(rotations, recipe.group_size, rounding)
    layout = CacheLayout.of_recipe(recipe, SEGMENTS if recipe.budget else SGLANG)
    return codec_bits(artifact.geometry, codec, layout, tokens)
